//! Decodes BTF, the kernel's description of its own types: where a field lies, what a tracepoint passes.
//!
//! Pure: bytes in, answers out. The parser never panics and always ends soon, on any input (the bytes come
//! from the kernel, but from *any* kernel). Format: Documentation/bpf/btf.rst.

mod table;

use self::table::{MAX_DEPTH, Table, kind};
use thiserror::Error;

/// Maximum number of members that one lookup visits; the largest kernel structs have some 300.
const MAX_STEPS: u32 = 100_000;

/// Error of a BTF lookup.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BtfError {
    /// The bytes are not BTF, or are cut off.
    #[error("not valid BTF: {0}")]
    Malformed(&'static str),
    /// The kernel lacks the type.
    #[error("the kernel's BTF has no {0}")]
    NoType(String),
    /// The kernel has the type, but not this field.
    #[error("the kernel's BTF has no field {0}")]
    NoField(String),
    /// The tracepoint's arguments differ from those that the program reads.
    #[error("the tracepoint {tracepoint} does not begin with {expected} in this kernel")]
    OtherArguments {
        /// Name of the tracepoint.
        tracepoint: &'static str,
        /// Arguments that the program reads, in order.
        expected: &'static str,
    },
}

/// Position of a field in its outermost struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Field {
    /// Byte offset of the field, or of the byte that holds a bit field's first bit.
    pub(super) offset: u32,
    /// For a bit field of a little-endian kernel: its first bit in that byte; otherwise 0.
    pub(super) bit: u32,
    /// Width in bits of a bit field; otherwise 0.
    pub(super) bits: u32,
}

/// A field that is an array of structs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ArrayField {
    /// Byte offset of the array.
    pub(super) offset: u32,
    /// Name of the element's struct.
    pub(super) element: String,
    /// Size of one element in bytes.
    pub(super) element_bytes: u32,
}

/// An argument that a tracepoint passes to a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Argument {
    /// Name of the argument, if the kernel's BTF still has it.
    pub(super) name: Option<String>,
    /// Name of the struct that the argument points to, if it is a pointer to a struct.
    pub(super) points_to: Option<String>,
    /// True if the argument is a plain integer.
    pub(super) integer: bool,
}

/// The types of one kernel.
#[derive(Debug)]
pub struct Btf(Table);

impl Btf {
    /// Reads the header and finds where each type begins.
    ///
    /// # Errors
    /// The bytes are not little-endian BTF, or are cut off.
    pub fn parse(bytes: Vec<u8>) -> Result<Btf, BtfError> {
        Table::parse(bytes).map(Btf)
    }

    /// Returns the position of the field `path` of `struct name`. `path` is a list of names joined by dots;
    /// members of anonymous structs and unions are found too.
    ///
    /// # Errors
    /// The kernel lacks the struct or the field.
    pub(super) fn field(&self, name: &str, path: &str) -> Result<Field, BtfError> {
        self.locate(name, path).map(|(field, _)| field)
    }

    /// Returns the position of the array of structs at `path` of `struct name`.
    ///
    /// # Errors
    /// The kernel lacks the struct or the field, or the field is not an array of structs.
    pub(super) fn array(&self, name: &str, path: &str) -> Result<ArrayField, BtfError> {
        let (field, id) = self.locate(name, path)?;
        let missing = || BtfError::NoField(format!("{name}.{path} that is an array of structs"));
        let array = self.0.resolve(id).filter(|record| record.kind == kind::ARRAY).ok_or_else(missing)?;
        // `struct btf_array` follows: the element's type comes first.
        let element = self.0.word(array.at + 12).and_then(|id| self.0.resolve(id));
        let element = element.filter(|record| record.kind == kind::STRUCT).ok_or_else(missing)?;
        let named = self.0.string(element.name).ok_or_else(missing)?;
        Ok(ArrayField { offset: field.offset, element: named.to_owned(), element_bytes: element.other })
    }

    /// Returns the id and the size in bytes of `struct name`.
    ///
    /// # Errors
    /// The kernel lacks the struct.
    pub(super) fn structure(&self, name: &str) -> Result<(u32, u32), BtfError> {
        let missing = || BtfError::NoType(format!("struct {name}"));
        let id = self.0.find(kind::STRUCT, name).ok_or_else(missing)?;
        Ok((id, self.0.record(id).ok_or_else(missing)?.other))
    }

    /// Returns the index and the byte offset of a direct member of `struct name`.
    ///
    /// # Errors
    /// The kernel lacks the struct or the member.
    pub(super) fn place(&self, name: &str, member: &str) -> Result<(u32, u32), BtfError> {
        let missing = || BtfError::NoField(format!("{name}.{member}"));
        let (id, _) = self.structure(name)?;
        let record = self.0.record(id).ok_or_else(missing)?;
        let named = |index: u32| {
            self.0
                .word(record.at + 12 + 12 * index as usize)
                .is_some_and(|string| self.0.is_named(string, member))
        };
        let index = (0..record.count).find(|index| named(*index)).ok_or_else(missing)?;
        Ok((index, self.field(name, member)?.offset))
    }

    /// Returns the id of a function.
    pub(super) fn function(&self, name: &str) -> Option<u32> {
        self.0.find(kind::FUNC, name)
    }

    /// Returns the position of a field and the id of its type.
    fn locate(&self, name: &str, path: &str) -> Result<(Field, u32), BtfError> {
        let mut id =
            self.0.find(kind::STRUCT, name).ok_or_else(|| BtfError::NoType(format!("struct {name}")))?;
        let missing = || BtfError::NoField(format!("{name}.{path}"));
        let (mut bits, mut width) = (0_u32, 0);
        let mut steps = MAX_STEPS;
        for part in path.split('.') {
            let member = self.0.member(id, part, MAX_DEPTH, &mut steps).ok_or_else(missing)?;
            bits = bits.checked_add(member.bit_offset).ok_or_else(missing)?;
            width = member.bits;
            id = member.id;
        }
        if width == 0 && bits % 8 != 0 {
            return Err(missing());
        }
        Ok((Field { offset: bits / 8, bit: if width == 0 { 0 } else { bits % 8 }, bits: width }, id))
    }

    /// Returns the arguments of the tracepoint `name`, without the hidden first one.
    ///
    /// The types come from `btf_trace_<name>`, which is also what the kernel checks programs against. Names
    /// come from `__traceiter_<name>` or `__bpf_trace_<name>`, where the BTF has these functions.
    ///
    /// # Errors
    /// The kernel lacks the tracepoint.
    pub(super) fn tracepoint(&self, name: &str) -> Result<Vec<Argument>, BtfError> {
        let missing = || BtfError::NoType(format!("tracepoint {name}"));
        let typedef = self.0.find(kind::TYPEDEF, &format!("btf_trace_{name}")).ok_or_else(missing)?;
        let pointer =
            self.0.resolve(typedef).filter(|record| record.kind == kind::PTR).ok_or_else(missing)?;
        let types = self.0.parameters(pointer.other).ok_or_else(missing)?;
        let names = ["__traceiter_", "__bpf_trace_"]
            .iter()
            .filter_map(|prefix| self.0.find(kind::FUNC, &format!("{prefix}{name}")))
            .filter_map(|function| self.0.parameters(self.0.record(function)?.other))
            .find(|parameters| parameters.len() == types.len())
            .unwrap_or_default();
        Ok(types
            .iter()
            .enumerate()
            .skip(1)
            .map(|(index, (_, id))| Argument {
                name: names
                    .get(index)
                    .and_then(|(name, _)| self.0.string(*name))
                    .filter(|name| !name.is_empty())
                    .map(str::to_owned),
                points_to: self.pointee(*id),
                integer: self
                    .0
                    .resolve(*id)
                    .is_some_and(|record| matches!(record.kind, kind::INT | kind::ENUM)),
            })
            .collect())
    }

    /// Returns the name of the struct that a pointer of type `id` points to.
    fn pointee(&self, id: u32) -> Option<String> {
        let pointer = self.0.resolve(id).filter(|record| record.kind == kind::PTR)?;
        let target = self.0.resolve(pointer.other).filter(|record| record.kind == kind::STRUCT)?;
        self.0.string(target.name).map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use super::table::MAGIC;
    use super::*;
    use proptest::prelude::*;

    /// Writes BTF as a compiler would, for tests.
    #[derive(Default)]
    struct Writer {
        types: Vec<u8>,
        strings: Vec<u8>,
        next: u32,
    }

    impl Writer {
        fn new() -> Writer {
            Writer { types: Vec::new(), strings: vec![0], next: 1 }
        }

        fn name(&mut self, name: &str) -> u32 {
            if name.is_empty() {
                return 0;
            }
            let at = self.strings.len() as u32;
            self.strings.extend(name.as_bytes());
            self.strings.push(0);
            at
        }

        fn add(&mut self, name: &str, kind: u32, count: u32, flag: u32, other: u32, rest: &[u32]) -> u32 {
            let name = self.name(name);
            for word in [name, flag << 31 | kind << 24 | count, other].iter().chain(rest) {
                self.types.extend(word.to_le_bytes());
            }
            self.next += 1;
            self.next - 1
        }

        fn strukt(&mut self, name: &str, flag: u32, members: &[(&str, u32, u32)]) -> u32 {
            let mut rest = Vec::new();
            for (name, id, offset) in members {
                rest.extend([self.name(name), *id, *offset]);
            }
            self.add(name, kind::STRUCT, members.len() as u32, flag, 64, &rest)
        }

        fn bytes(&self) -> Vec<u8> {
            let (types, strings) = (self.types.len() as u32, self.strings.len() as u32);
            let mut bytes = Vec::new();
            for word in [u32::from(MAGIC) | 1 << 16, 24, 0, types, types, strings] {
                bytes.extend(word.to_le_bytes());
            }
            bytes.extend(&self.types);
            bytes.extend(&self.strings);
            bytes
        }
    }

    /// A `sock` with a nested struct, an anonymous union and a bit field, and a tracepoint about it.
    fn sample() -> Vec<u8> {
        let mut w = Writer::new();
        let int = w.add("int", kind::INT, 0, 0, 4, &[0x0100_0020]);
        let addr = {
            let (a, b) = (w.name("skc_addrpair"), w.name("skc_daddr"));
            w.add("", kind::UNION, 2, 0, 8, &[a, int, 0, b, int, 32])
        };
        let common = w.strukt(
            "sock_common",
            1,
            &[("", addr, 0), ("skc_flags", int, 4 << 24 | 152), ("skc_num", int, 96)],
        );
        let alias = w.add("common_t", kind::TYPEDEF, 0, 0, common, &[]);
        let several = w.add("", kind::ARRAY, 0, 0, 0, &[alias, int, 4]);
        let members = [("__sk_common", alias, 64), ("sk_protocol", int, 1024), ("several", several, 2048)];
        let sock = w.strukt("sock", 0, &members);
        let constant = w.add("", kind::CONST, 0, 0, sock, &[]);
        let pointer = w.add("", kind::PTR, 0, 0, constant, &[]);
        let void = w.add("", kind::PTR, 0, 0, 0, &[]);
        let proto = w.add("", kind::FUNC_PROTO, 3, 0, 0, &[0, void, 0, pointer, 0, int]);
        let proto_pointer = w.add("", kind::PTR, 0, 0, proto, &[]);
        w.add("btf_trace_state", kind::TYPEDEF, 0, 0, proto_pointer, &[]);
        let (data, sk, new) = (w.name("__data"), w.name("sk"), w.name("newstate"));
        let named = w.add("", kind::FUNC_PROTO, 3, 0, int, &[data, void, sk, pointer, new, int]);
        w.add("__traceiter_state", kind::FUNC, 0, 0, named, &[]);
        w.bytes()
    }

    #[test]
    fn fields_are_found_through_typedefs_anonymous_unions_and_nested_structs() {
        let btf = Btf::parse(sample()).unwrap();
        let check = |name: &str, path: &str, expected: Result<(u32, u32, u32), &str>| {
            let found = btf.field(name, path).map(|field| (field.offset, field.bit, field.bits));
            assert_eq!(found.map_err(|e| e.to_string()), expected.map_err(str::to_owned), "{name}.{path}");
        };
        check("sock", "sk_protocol", Ok((128, 0, 0)));
        check("sock", "__sk_common.skc_num", Ok((20, 0, 0)));
        check("sock", "__sk_common.skc_daddr", Ok((12, 0, 0)));
        check("sock_common", "skc_daddr", Ok((4, 0, 0)));
        check("sock_common", "skc_flags", Ok((19, 0, 4)));
        check("sock", "nothing", Err("the kernel's BTF has no field sock.nothing"));
        check("sock", "sk_protocol.deeper", Err("the kernel's BTF has no field sock.sk_protocol.deeper"));
        check("dock", "sk_protocol", Err("the kernel's BTF has no struct dock"));
    }

    #[test]
    fn an_array_of_structs_has_a_stride() {
        let btf = Btf::parse(sample()).unwrap();
        let expected = ArrayField { offset: 256, element: "sock_common".to_owned(), element_bytes: 64 };
        assert_eq!(btf.array("sock", "several"), Ok(expected));
        let error = btf.array("sock", "sk_protocol").unwrap_err().to_string();
        assert_eq!(error, "the kernel's BTF has no field sock.sk_protocol that is an array of structs");
    }

    #[test]
    fn tracepoint_arguments_have_types_and_names() {
        let btf = Btf::parse(sample()).unwrap();
        let arguments = btf.tracepoint("state").unwrap();
        assert_eq!(arguments.len(), 2);
        assert_eq!(arguments[0].name.as_deref(), Some("sk"));
        assert_eq!(arguments[0].points_to.as_deref(), Some("sock"));
        assert!(!arguments[0].integer);
        assert_eq!(arguments[1].name.as_deref(), Some("newstate"));
        assert!(arguments[1].integer);
        assert_eq!(btf.tracepoint("other"), Err(BtfError::NoType("tracepoint other".to_owned())));
    }

    #[test]
    fn a_struct_that_contains_itself_ends() {
        let mut w = Writer::new();
        w.strukt("loop", 0, &[("", 1, 0), ("", 1, 0), ("", 1, 0)]);
        let btf = Btf::parse(w.bytes()).unwrap();
        assert_eq!(btf.field("loop", "x"), Err(BtfError::NoField("loop.x".to_owned())));
    }

    #[test]
    fn invalid_btf_is_refused_with_the_reason() {
        let check = |bytes: &[u8], expected: &str| {
            assert_eq!(Btf::parse(bytes.to_vec()).unwrap_err().to_string(), expected);
        };
        check(b"", "not valid BTF: the header is cut off");
        check(b"\x7fELF", "not valid BTF: the magic number is wrong");
        check(&sample()[..23], "not valid BTF: the header is cut off");
        check(&sample()[..60], "not valid BTF: the type section is cut off");
    }

    fn ask(bytes: Vec<u8>) {
        if let Ok(btf) = Btf::parse(bytes) {
            let _ = btf.field("sock", "__sk_common.skc_flags");
            let _ = btf.field("sock_common", "skc_none");
            let _ = btf.array("sock", "several");
            let _ = btf.tracepoint("state");
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            ask(bytes);
        }

        #[test]
        fn damaged_btf_never_panics(
            damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = sample();
            for (index, value) in damage {
                let at = index.index(bytes.len());
                bytes[at] = value;
            }
            let whole = bytes.clone();
            ask(whole);
            bytes.truncate(cut.index(bytes.len()));
            ask(bytes);
        }
    }
}
