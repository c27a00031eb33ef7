//! How many files the process may have open.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the limit of open files as far as it may be, and answers it. What services get otherwise, 1,024,
/// is for programs that still use select(2).
pub fn raise_file_limit() -> usize {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
    let limit = if setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() { hard } else { soft };
    usize::try_from(limit).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_to_what_it_may_be() {
        let limit = raise_file_limit();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!((soft, usize::try_from(hard).unwrap()), (hard, limit));
    }
}
