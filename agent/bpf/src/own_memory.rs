//! The agent's own memory: how little of it the C library's allocator and the kernel keep for us. Here
//! because that takes `unsafe`, and this is the crate that may. Must not decide when.

/// Gives back to the system what the C library's allocator keeps of freed memory, and unmaps the program's
/// own code and constants. What of them is still used is mapped again, 16 pages at a time, from the kernel's
/// page cache; what only the start or a rare command needed is not, and the kernel may drop it where memory
/// is short. Takes some milliseconds where there is much.
pub fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes a number, locks the allocator as free(3) does, and changes no memory that
    // is in use.
    unsafe {
        libc::malloc_trim(0);
    }
    for (start, length) in own_constant_pages() {
        // SAFETY: the pages are a private mapping of the program's file that nobody may write: they hold what
        // the file holds, and the kernel reads them from there when they are touched next (madvise(2),
        // MADV_DONTNEED). A running program's file can't be written (ETXTBSY). Pages that are not there any
        // more are an error and nothing else.
        unsafe {
            libc::madvise(std::ptr::with_exposed_provenance_mut(start), length, libc::MADV_DONTNEED);
        }
    }
}

/// The whole pages of the program's segments that nobody may write, as addresses and lengths.
fn own_constant_pages() -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    // SAFETY: the function calls back before it returns, with this vector.
    unsafe {
        libc::dl_iterate_phdr(Some(constant_pages_of_program), (&raw mut found).cast());
    }
    found
}

/// Of the first object only, which is the program itself (dl_iterate_phdr(3)).
unsafe extern "C" fn constant_pages_of_program(
    info: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    found: *mut libc::c_void,
) -> libc::c_int {
    let page = rustix::param::page_size();
    // SAFETY: the C library gives a whole `dl_phdr_info`, whose headers are `dlpi_phnum` in number and are
    // there as long as the program; `found` is what our only caller gave.
    let (info, headers, found) = unsafe {
        let info = &*info;
        let headers = std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum));
        (info, headers, &mut *found.cast::<Vec<(usize, usize)>>())
    };
    let constant =
        |header: &&libc::Elf64_Phdr| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0;
    for header in headers.iter().filter(constant) {
        let start = (info.dlpi_addr + header.p_vaddr) as usize;
        let end = start + header.p_filesz as usize;
        // A page at either end may be another segment's too.
        let (start, end) = (start.next_multiple_of(page), end / page * page);
        found.extend((start < end).then(|| (start, end - start)));
    }
    // Not the next object.
    1
}

/// Makes the C library's allocator keep less of what was freed. All threads share a few arenas: by default
/// each of dozens of short-lived threads gets one of its own, and keeps what was freed in it. And large
/// pieces stay outside of them: by default the first list of a runtime that is freed makes the allocator put
/// all that are no larger between the small pieces that stay, where each leaves a hole (docs/density.md). To
/// be called before there are threads.
pub fn tame_allocator() {
    #[cfg(target_env = "gnu")]
    const ARENAS: libc::c_int = 2;
    #[cfg(target_env = "gnu")]
    const LARGE_BYTES: libc::c_int = 64 << 10;
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) takes two numbers and changes only the allocator's settings; before there are other
    // threads nobody reads them meanwhile. A refusal (0) leaves things as they were.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How much of each mapping that the program's own pages lie in is there, in KiB.
    fn resident() -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own: Vec<(usize, usize)> = own_constant_pages();
        let (mut sum, mut within) = (0, false);
        for line in smaps.lines() {
            let mut words = line.split_whitespace();
            let Some(first) = words.next() else { continue };
            if let Some((start, end)) = first.split_once('-') {
                let address = |text| usize::from_str_radix(text, 16).unwrap();
                let (start, end) = (address(start), address(end));
                within = own.iter().any(|(at, length)| start <= *at && at + length <= end);
            } else if first == "Rss:" && within {
                sum += words.next().unwrap().parse::<u64>().unwrap();
            }
        }
        sum
    }

    #[test]
    fn the_programs_code_is_there_when_it_is_needed_and_not_before() {
        let own = own_constant_pages();
        let here = resident as *const () as usize;
        assert!(own.iter().any(|(start, length)| (*start..start + length).contains(&here)), "{own:?}");
        let all: usize = own.iter().map(|(_, length)| length >> 10).sum();
        for (start, length) in own {
            for page in (start..start + length).step_by(4096) {
                // SAFETY: a mapped page of the program's own file.
                unsafe { std::ptr::with_exposed_provenance::<u8>(page).read_volatile() };
            }
        }
        let before = resident();
        assert!(before as usize >= all * 9 / 10, "{before} of {all} KiB");
        give_memory_back();
        let after = resident();
        assert!(after < before / 2, "{after} of {before} KiB are still there");
    }
}
