//! The agent's own memory: limits how much of it the C library's allocator and the kernel keep. The functions
//! live here because they need `unsafe`, which this crate may use. Must not decide when to release memory.

/// Returns freed memory that the C library's allocator keeps to the system, and unmaps the program's own code
/// and constants. Pages still in use are mapped again, 16 at a time, from the kernel's page cache; pages that
/// only the start or a rare command needed are not, and the kernel may drop them when memory is short. Takes
/// some milliseconds if there is much to release.
pub fn release_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes a number, locks the allocator as free(3) does, and changes no memory that
    // is in use.
    unsafe {
        libc::malloc_trim(0);
    }
    for (start, length) in own_constant_pages() {
        // SAFETY: the pages are a private, read-only mapping of the program's file: they equal the file's
        // content, and the kernel reads them from the file at the next access (madvise(2), MADV_DONTNEED). A
        // running program's file can't be written (ETXTBSY). For unmapped pages the call only returns an
        // error.
        unsafe {
            libc::madvise(std::ptr::with_exposed_provenance_mut(start), length, libc::MADV_DONTNEED);
        }
    }
}

/// Returns the whole pages of the program's read-only segments, as addresses and lengths.
fn own_constant_pages() -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    // SAFETY: the function runs the callback only before it returns, and passes it this vector.
    unsafe {
        libc::dl_iterate_phdr(Some(constant_pages_of_program), (&raw mut found).cast());
    }
    found
}

/// Collects the pages of the first object only, which is the program itself (dl_iterate_phdr(3)).
unsafe extern "C" fn constant_pages_of_program(
    info: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    found: *mut libc::c_void,
) -> libc::c_int {
    let page = rustix::param::page_size();
    // SAFETY: the C library passes a whole `dl_phdr_info` with `dlpi_phnum` headers, which live as long as
    // the program; `found` is the vector that the only caller passed.
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
        // A page at either end may also belong to another segment.
        let (start, end) = (start.next_multiple_of(page), end / page * page);
        found.extend((start < end).then(|| (start, end - start)));
    }
    // Stops before the next object.
    1
}

/// Makes the C library's allocator keep less freed memory. All threads share a few arenas: by default each of
/// dozens of short-lived threads gets an arena of its own, which keeps the memory freed in it. Large
/// allocations stay outside of the arenas: by default, freeing the first list of a runtime makes the
/// allocator place all allocations up to that size between the small ones that stay, where each leaves a hole
/// (docs/density.md). Must be called before the first thread starts.
pub fn tame_allocator() {
    #[cfg(target_env = "gnu")]
    const ARENAS: libc::c_int = 2;
    #[cfg(target_env = "gnu")]
    const LARGE_BYTES: libc::c_int = 64 << 10;
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) takes two numbers and changes only the allocator's settings, which no other thread
    // can read at the same time, since none exists yet. A refusal (0) changes nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the resident size of the mappings that hold the program's own pages, in KiB.
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
    fn released_code_pages_are_mapped_again_only_on_use() {
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
        release_memory();
        let after = resident();
        assert!(after < before / 2, "{after} of {before} KiB are still resident");
    }
}
