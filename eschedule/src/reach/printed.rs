//! What a guest printed, as text that does nothing to the terminal which shows it.

use std::mem;

use anstream::adapter::StripBytes;

/// Takes what came piece by piece, however it is cut.
#[derive(Debug, Default)]
pub(super) struct Printed {
    sequences: StripBytes,
    /// The beginning of a character whose end has not come.
    begun: Vec<u8>,
}

impl Printed {
    /// The text of the next piece: without escape sequences, and then without the control characters that are left, which
    /// begin one for a terminal where the filter of sequences took them for part of a character.
    pub(super) fn next(&mut self, piece: &[u8]) -> String {
        let mut bytes = mem::take(&mut self.begun);
        for line in piece.split_inclusive(|byte| *byte == b'\n') {
            let before = bytes.len();
            bytes.extend(self.sequences.strip_next(line).flatten());
            // A sequence of text that nobody ends would take all that follows, the guest's last words among it.
            if line.ends_with(b"\n") {
                self.sequences = StripBytes::new();
                bytes.extend((!bytes[before..].ends_with(b"\n")).then_some(b'\n'));
            }
        }
        let mut text = String::with_capacity(bytes.len());
        for chunk in bytes.utf8_chunks() {
            text.extend(chunk.valid().chars().filter(|c| matches!(c, '\n' | '\t') || !c.is_control()));
            let is_last = chunk.invalid().as_ptr_range().end == bytes.as_ptr_range().end;
            if is_last && is_begin(chunk.invalid()) {
                self.begun = chunk.invalid().to_vec();
            } else if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        text
    }
}

/// Whether these bytes may be the beginning of a character.
fn is_begin(bytes: &[u8]) -> bool {
    !bytes.is_empty() && std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same of the whole, and of each byte by itself.
    fn printed(bytes: &[u8]) -> String {
        let whole = Printed::default().next(bytes);
        let mut by_bytes = Printed::default();
        let each: String = bytes.iter().map(|byte| by_bytes.next(&[*byte])).collect();
        assert_eq!(each, whole, "cut anywhere");
        whole
    }

    #[test]
    fn only_what_a_terminal_shows_is_left() {
        for (bytes, text) in [
            (&b"\x1b[01;31mred\x1b[0m\r\n"[..], "red\n"),
            (b"\x1b]0;title\x07a\tb\x08", "a\tb"),
            // What the filter of sequences takes for the end of a character.
            (b"\xc2\x1b]52;c;aGk=\x07", "\u{fffd}]52;c;aGk="),
            (b"a\xc2\x9b2Jb", "a2Jb"),
            (b"\xe4\xb8\x1b[2J", "\u{fffd}[2J"),
            ("Grüße, 世界\n".as_bytes(), "Grüße, 世界\n"),
            (b"\xff\xfeok", "ok"),
            // One that nobody ends takes the rest of its line.
            (b"a\x1b]x\nline\n", "a\nline\n"),
            (b"a\n\x1bPx\nline\n", "a\n\nline\n"),
        ] {
            assert_eq!(printed(bytes), text, "{bytes:?}");
        }
    }
}
