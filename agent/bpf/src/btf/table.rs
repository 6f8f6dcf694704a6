//! The records of BTF: the fixed part of each type, its trailing words, and the names.

use super::BtfError;

pub(super) const MAGIC: u16 = 0xeb9f;
/// Bound on the nesting of anonymous members and on typedef chains; no kernel reaches it.
pub(super) const MAX_DEPTH: u32 = 32;

/// Kinds of types (`BTF_KIND_*`).
pub(super) mod kind {
    pub(in super::super) const INT: u32 = 1;
    pub(in super::super) const PTR: u32 = 2;
    pub(in super::super) const ARRAY: u32 = 3;
    pub(in super::super) const STRUCT: u32 = 4;
    pub(in super::super) const UNION: u32 = 5;
    pub(in super::super) const ENUM: u32 = 6;
    pub(in super::super) const TYPEDEF: u32 = 8;
    pub(in super::super) const VOLATILE: u32 = 9;
    pub(in super::super) const CONST: u32 = 10;
    pub(in super::super) const RESTRICT: u32 = 11;
    pub(in super::super) const FUNC: u32 = 12;
    pub(in super::super) const FUNC_PROTO: u32 = 13;
    pub(in super::super) const VAR: u32 = 14;
    pub(in super::super) const DATASEC: u32 = 15;
    pub(in super::super) const DECL_TAG: u32 = 17;
    pub(in super::super) const TYPE_TAG: u32 = 18;
    pub(in super::super) const ENUM64: u32 = 19;
}

/// The records of types and their names.
#[derive(Debug)]
pub(super) struct Table {
    bytes: Vec<u8>,
    strings: std::ops::Range<usize>,
    /// Offset of each type's record; the index is the type's id. Id 0 is `void`.
    records: Vec<usize>,
}

/// The fixed part of a type's record.
#[derive(Clone, Copy)]
pub(super) struct Record {
    pub(super) at: usize,
    pub(super) name: u32,
    pub(super) kind: u32,
    pub(super) count: u32,
    pub(super) kind_flag: bool,
    /// Id of the type that this one refers to, or a size.
    pub(super) other: u32,
}

impl Table {
    /// Reads the header and finds where each type begins.
    ///
    /// # Errors
    /// The bytes are not little-endian BTF, or are cut off.
    pub(super) fn parse(bytes: Vec<u8>) -> Result<Table, BtfError> {
        let header = |at: usize| read_u32(&bytes, at).ok_or(BtfError::Malformed("the header is cut off"));
        let magic = header(0)? & 0xffff;
        if magic != u32::from(MAGIC) {
            return Err(BtfError::Malformed("the magic number is wrong"));
        }
        let (header_len, type_off, type_len) = (header(4)?, header(8)?, header(12)?);
        let (str_off, str_len) = (header(16)?, header(20)?);
        let section = |off: u32, len: u32| {
            let start = (header_len as usize).checked_add(off as usize)?;
            let end = start.checked_add(len as usize)?;
            (end <= bytes.len()).then_some(start..end)
        };
        let types = section(type_off, type_len).ok_or(BtfError::Malformed("the type section is cut off"))?;
        let strings =
            section(str_off, str_len).ok_or(BtfError::Malformed("the string section is cut off"))?;
        let mut records = vec![usize::MAX];
        let mut at = types.start;
        while at < types.end {
            records.push(at);
            let record = read_record(&bytes, at).ok_or(BtfError::Malformed("a type is cut off"))?;
            at = at
                .checked_add(12 + trailing_bytes(record))
                .filter(|next| *next <= types.end)
                .ok_or(BtfError::Malformed("a type is cut off"))?;
        }
        Ok(Table { bytes, strings, records })
    }

    /// Returns the name and type of each parameter of a function prototype.
    pub(super) fn parameters(&self, id: u32) -> Option<Vec<(u32, u32)>> {
        let record = self.record(id).filter(|record| record.kind == kind::FUNC_PROTO)?;
        (0..record.count as usize)
            .map(|index| {
                let at = record.at + 12 + 8 * index;
                Some((self.word(at)?, self.word(at + 4)?))
            })
            .collect()
    }

    /// Finds the member `name` of a struct or union, also inside anonymous members.
    pub(super) fn member(&self, id: u32, name: &str, depth: u32, steps: &mut u32) -> Option<Member> {
        let depth = depth.checked_sub(1)?;
        let record = self.resolve(id).filter(|record| matches!(record.kind, kind::STRUCT | kind::UNION))?;
        for index in 0..record.count as usize {
            *steps = steps.checked_sub(1)?;
            let at = record.at + 12 + 12 * index;
            let (member_name, member_id) = (self.word(at)?, self.word(at + 4)?);
            let raw = self.word(at + 8)?;
            // With the kind flag the upper byte is a bit field's width.
            let (bit_offset, bits) = if record.kind_flag { (raw & 0x00ff_ffff, raw >> 24) } else { (raw, 0) };
            let found = self.string(member_name)?;
            if found == name {
                return Some(Member { id: member_id, bit_offset, bits });
            }
            if found.is_empty()
                && let Some(inner) = self.member(member_id, name, depth, steps)
            {
                return Some(Member { bit_offset: bit_offset.checked_add(inner.bit_offset)?, ..inner });
            }
        }
        None
    }

    /// Resolves typedefs and qualifiers to the type behind them.
    pub(super) fn resolve(&self, mut id: u32) -> Option<Record> {
        for _ in 0..MAX_DEPTH {
            let record = self.record(id)?;
            match record.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = record.other;
                }
                _ => return Some(record),
            }
        }
        None
    }

    /// Returns the id of the first type of that kind and name.
    pub(super) fn find(&self, kind: u32, name: &str) -> Option<u32> {
        (1..self.records.len()).find_map(|index| {
            let id = u32::try_from(index).ok()?;
            let record = self.record(id).filter(|record| record.kind == kind)?;
            self.is_named(record.name, name).then_some(id)
        })
    }

    pub(super) fn record(&self, id: u32) -> Option<Record> {
        let at = *self.records.get(id as usize)?;
        if at == usize::MAX { None } else { read_record(&self.bytes, at) }
    }

    pub(super) fn is_named(&self, offset: u32, name: &str) -> bool {
        let Some(strings) = self.bytes.get(self.strings.clone()) else { return false };
        strings
            .get(offset as usize..)
            .and_then(|rest| rest.strip_prefix(name.as_bytes()))
            .is_some_and(|rest| rest.first() == Some(&0))
    }

    pub(super) fn string(&self, offset: u32) -> Option<&str> {
        let rest = self.bytes.get(self.strings.clone())?.get(offset as usize..)?;
        let end = rest.iter().position(|byte| *byte == 0)?;
        std::str::from_utf8(&rest[..end]).ok()
    }

    /// Returns the word at an offset of the file.
    pub(super) fn word(&self, at: usize) -> Option<u32> {
        read_u32(&self.bytes, at)
    }
}

/// A member of a struct or union.
pub(super) struct Member {
    pub(super) id: u32,
    pub(super) bit_offset: u32,
    pub(super) bits: u32,
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    let slice = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(slice.try_into().ok()?))
}

fn read_record(bytes: &[u8], at: usize) -> Option<Record> {
    let info = read_u32(bytes, at + 4)?;
    Some(Record {
        at,
        name: read_u32(bytes, at)?,
        kind: (info >> 24) & 0x1f,
        count: info & 0xffff,
        kind_flag: info >> 31 == 1,
        other: read_u32(bytes, at + 8)?,
    })
}

/// Returns the number of bytes after a type's fixed part.
fn trailing_bytes(record: Record) -> usize {
    let count = record.count as usize;
    match record.kind {
        kind::INT | kind::VAR | kind::DECL_TAG => 4,
        kind::ARRAY => 12,
        kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12 * count,
        kind::ENUM | kind::FUNC_PROTO => 8 * count,
        _ => 0,
    }
}
