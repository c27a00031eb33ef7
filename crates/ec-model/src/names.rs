//! Names that others give to things of theirs.

/// Whether a network interface of Linux can be called so.
pub fn is_interface_name(name: &str) -> bool {
    // IFNAMSIZ is 16 with its closing zero.
    (1..16).contains(&name.len())
        && ![".", ".."].contains(&name)
        && name.chars().all(|c| c.is_ascii_graphic() && c != '/' && c != ':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_called_as_the_kernel_takes_it() {
        for name in ["virbr0", "br-1", "eth0.7", "a"] {
            assert!(is_interface_name(name), "{name}");
        }
        for name in ["", "a/b", "a b", "..", "a:b", "ü", "a234567890123456", "a\n"] {
            assert!(!is_interface_name(name), "{name}");
        }
    }
}
