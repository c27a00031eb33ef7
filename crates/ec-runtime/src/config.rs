//! Configuration files: where they are looked for, and how their mistakes are told. What a section means is
//! said where it is used.

use std::{
    env,
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use serde::{Deserialize, de::DeserializeOwned};

use crate::exit::tell;

/// Bytes of a configuration file at most.
const LARGEST: u64 = 1 << 20;

/// A configuration that cannot be used. Says where, what, and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is there and cannot be read, or was named and is not there.
    #[error("cannot read configuration {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file's content is wrong.
    #[error("{location}: {message}")]
    Wrong {
        /// `file:line:column`, or the file alone where the place is not known.
        location: String,
        /// What is wrong and what would be right.
        message: String,
    },
}

/// A configuration and the file that it came from; none where defaults serve.
#[derive(Debug)]
pub struct Loaded<T> {
    /// What the file says, with defaults for the rest.
    pub config: T,
    /// The file.
    pub path: Option<PathBuf>,
}

impl<T> Loaded<T> {
    /// An error about a value of this configuration.
    pub fn wrong(&self, message: impl Into<String>) -> ConfigError {
        let location =
            self.path.as_ref().map_or("configuration".to_owned(), |path| path.display().to_string());
        ConfigError::Wrong { location, message: message.into() }
    }
}

/// Reads the named file, else the first of `places` that is there, else defaults. What somebody else left in the current
/// directory is passed over with a word: it could name a server that is sent what this user's own files let in with.
pub fn load<T: DeserializeOwned + Default>(
    named: Option<&Path>,
    places: &[&Path],
) -> Result<Loaded<T>, ConfigError> {
    let candidates = named.map_or_else(|| places.to_vec(), |path| vec![path]);
    for path in candidates {
        if named.is_none() && path.is_relative() && is_strangers(path) {
            tell(&format!(
                "warning: {} in this directory is not read, since it belongs to another user, or others may write it: name it with --config \
                 where it is meant",
                path.display()
            ));
            continue;
        }
        match read(path) {
            Ok(text) => return Ok(Loaded { config: parse(&text, path)?, path: Some(path.to_owned()) }),
            Err(error) if error.kind() == io::ErrorKind::NotFound && named.is_none() => {}
            Err(source) => return Err(ConfigError::Unreadable { path: path.to_owned(), source }),
        }
    }
    Ok(Loaded { config: T::default(), path: None })
}

/// Whether a file is neither this user's nor the administrator's, or anybody may write it.
fn is_strangers(path: &Path) -> bool {
    let Ok(found) = fs::metadata(path) else { return false };
    // Who became root by sudo still works with files of their own.
    let sudo = env::var("SUDO_UID").ok().and_then(|uid| uid.parse().ok());
    let ours = [Some(0), Some(nix::unistd::geteuid().as_raw()), sudo];
    !ours.contains(&Some(found.uid())) || found.permissions().mode() & WRITABLE_FOR_OTHERS != 0
}

/// A device has no end, and what is larger is no configuration.
fn read(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LARGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST {
        let message = format!("it is larger than {} MiB, which no configuration is", LARGEST >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Reads a configuration from its text; `path` is for messages.
pub fn parse<T: DeserializeOwned + Default>(text: &str, path: &Path) -> Result<T, ConfigError> {
    let text = without_mark(text);
    // An empty file, or one with comments only, is no mapping for the YAML reader; for people it is
    // a file that changes nothing.
    if text
        .lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#') || line.trim() == "---")
    {
        return Ok(T::default());
    }
    if let Some(line) = too_deep(text) {
        let location = format!("{}:{line}", path.display());
        let message = format!("more than {DEEPEST} brackets are open at once, which no configuration needs");
        return Err(ConfigError::Wrong { location, message });
    }
    serde_yaml::from_str(text).map_err(|error| {
        // Of that the reader tells no place.
        let second =
            error.to_string().contains("more than one document").then(|| second_document(text)).flatten();
        if let Some(line) = second {
            let location = format!("{}:{line}:1", path.display());
            let message = "a second document begins here: wanted one in a file".to_owned();
            return ConfigError::Wrong { location, message };
        }
        let location = error.location().map_or_else(
            || path.display().to_string(),
            |place| format!("{}:{}:{}", path.display(), place.line(), place.column()),
        );
        ConfigError::Wrong { location, message: explain(&error.to_string()) }
    })
}

/// Without the byte order mark of an editor, which the YAML reader takes for a document of its own.
pub fn without_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// So deep a configuration may be. The YAML reader takes the square of the depth in time.
const DEEPEST: usize = 1000;

/// The line in which more brackets are open at once than a configuration needs; those in texts count, too.
fn too_deep(text: &str) -> Option<usize> {
    let mut open: usize = 0;
    for (number, line) in text.lines().enumerate() {
        for byte in line.bytes() {
            match byte {
                b'[' | b'{' => open += 1,
                b']' | b'}' => open = open.saturating_sub(1),
                _ => {}
            }
        }
        if open > DEEPEST {
            return Some(number + 1);
        }
    }
    None
}

/// The line with which a second document begins.
fn second_document(text: &str) -> Option<usize> {
    let mut lines = (1..).zip(text.lines());
    let says_something = |line: &str| !line.trim().is_empty() && !line.starts_with(['#', '%']);
    // The first may begin with such a line, too.
    lines.find(|(_, line)| says_something(line))?;
    let is_mark = |line: &str, mark| {
        line.strip_prefix(mark).is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t']))
    };
    // What follows the end of the first needs no beginning of its own.
    let mut is_ended = false;
    let mut begins = |line: &str| {
        let is_end = is_mark(line, "...");
        is_ended |= is_end;
        is_mark(line, "---") || (is_ended && !is_end && says_something(line))
    };
    lines.find(|(_, line)| begins(line)).map(|(number, _)| number)
}

/// Without the names that types have in the code.
fn in_words(text: &str) -> String {
    match text.split_once(", expected struct ") {
        Some((what, _)) => format!("{what}, wanted keys with values"),
        None => {
            let numbers =
                [("u8", " up to 255"), ("u16", " up to 65535"), ("u32", ""), ("u64", ""), ("usize", "")];
            let is_of = |(of, bound)| {
                let before = text.strip_suffix(&format!(", expected {of}"))?;
                Some(format!("{before}, wanted a whole number{bound}"))
            };
            let any = || Some(format!("{}, wanted a number", text.strip_suffix(", expected f64")?));
            let text = numbers.into_iter().find_map(is_of).or_else(any).unwrap_or_else(|| text.to_owned());
            text.replace(", expected ", ", wanted ").replace("unknown variant", "unknown word")
        }
    }
}

/// The YAML reader's words, without the place (which stands in front already) and with the nearest
/// key where one is unknown.
fn explain(text: &str) -> String {
    let text = text.rfind(" at line ").map_or(text, |at| &text[..at]);
    if text == "repetition limit exceeded" {
        return "aliases (`*NAME`) say one thing too often: wanted it written out".to_owned();
    }
    let text = &in_words(text).replace("invalid type: enum", "invalid type: a tag (`!NAME`)");
    let Some((section, rest)) = text.split_once("unknown field `") else {
        return text.to_owned();
    };
    let Some((key, expected)) = rest.split_once('`') else {
        return text.to_owned();
    };
    let known: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
    let nearest = known
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(&key.to_lowercase(), candidate), candidate))
        .min()
        // Further away than half of its letters, a suggestion only confuses.
        .filter(|(distance, candidate)| *distance <= candidate.len().div_ceil(2));
    let hint = match nearest {
        Some((_, candidate)) => format!("did you mean `{candidate}`?"),
        None => format!("known keys are {}", known.join(", ")),
    };
    format!("{section}unknown key `{key}`; {hint}")
}

/// A text that never shows in logs.
#[derive(Clone, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(hidden)")
    }
}

/// Of a file's mode, as in stat(2): S_IWOTH.
const WRITABLE_FOR_OTHERS: u32 = 0o002;

/// Of a file's mode, as in stat(2): S_IROTH.
const READABLE_FOR_OTHERS: u32 = 0o004;

/// One line for each of these files, which hold secrets, that every user of this machine may read.
pub fn exposed<'a>(secrets: impl IntoIterator<Item = &'a Path>) -> Vec<String> {
    secrets
        .into_iter()
        .filter(|path| {
            fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & READABLE_FOR_OTHERS != 0)
        })
        .map(|path| {
            let path = path.display();
            format!("{path} holds a secret and every user may read it: chmod o-r {path}")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Example {
        etcd: Part,
        placement: Part,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Part {
        host: Option<String>,
        port: Option<u16>,
        password: Option<Secret>,
    }

    fn wrong(text: &str) -> String {
        parse::<Example>(text, Path::new("compute.yaml")).unwrap_err().to_string()
    }

    #[test]
    fn an_unknown_key_is_named_with_its_place_and_the_nearest_right_one() {
        let text = wrong("etcd:\n  host: a\n  prot: 2379\n");
        assert!(
            text.starts_with("compute.yaml:3:3: etcd: unknown key `prot`; did you mean `port`?"),
            "{text}"
        );
        let text = wrong("plaecment:\n  endpoint: x\n");
        assert!(
            text.starts_with("compute.yaml:1:1: unknown key `plaecment`; did you mean `placement`?"),
            "{text}"
        );
        let text = wrong("zzzzzzzzzzzzzzzz: 1\n");
        assert!(text.contains("known keys are etcd, placement"), "{text}");
    }

    #[test]
    fn a_wrong_type_is_named_with_its_key_and_place() {
        let text = wrong("etcd:\n  port: many\n");
        assert!(
            text.starts_with(
                "compute.yaml:2:9: etcd.port: invalid type: string \"many\", wanted a whole number up to 65535"
            ),
            "{text}"
        );
        let text = wrong("- a\n");
        assert!(text.starts_with("compute.yaml:1:1: invalid type: sequence"), "{text}");
        let text = serde_yaml::from_str::<f64>("'16'").unwrap_err().to_string();
        assert_eq!(explain(&text), "invalid type: string \"16\", wanted a number");
    }

    #[test]
    fn what_the_reader_says_in_its_own_words_is_said_with_what_is_wanted() {
        let text = wrong("# ours\n---\netcd:\n  host: a\n---\nplacement: {}\n");
        assert!(text.starts_with("compute.yaml:5:1: a second document begins here"), "{text}");
        for (behind, line) in [
            ("...\n\n# theirs\nplacement: [\n", 6),
            ("... # over\n...\nplacement: {}\n", 5),
            ("...\n--- |\n", 4),
        ] {
            let text = wrong(&format!("etcd:\n  host: a\n{behind}"));
            let begins = format!("compute.yaml:{line}:1: a second document begins here");
            assert!(text.starts_with(&begins), "{behind}: {text}");
        }
        let text = explain("instances: invalid type: enum, expected keys with values at line 2 column 3");
        assert_eq!(text, "instances: invalid type: a tag (`!NAME`), wanted keys with values");
        let many = |name: &str| vec![format!("*{name}"); 9].join(", ");
        let mut bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for (one, next) in ["a", "b", "c", "d", "e", "f", "g"].windows(2).map(|two| (two[0], two[1])) {
            bomb += &format!("{next}: &{next} [{}]\n", many(one));
        }
        let text = serde_yaml::from_str::<serde_yaml::Value>(&bomb).unwrap_err().to_string();
        assert!(explain(&text).contains("wanted it written out"), "{text}");
    }

    #[test]
    fn an_empty_file_means_defaults_and_a_named_one_must_exist() {
        assert!(parse::<Example>("# nothing\n---\n", Path::new("x")).unwrap().etcd.host.is_none());
        let marked = parse::<Example>("\u{feff}etcd: {host: a}\nplacement: {}\n", Path::new("x")).unwrap();
        assert_eq!(marked.etcd.host.as_deref(), Some("a"));
        let error = load::<Example>(Some(Path::new("/nonexistent/x.yaml")), &[]).unwrap_err();
        assert_eq!(error.to_string(), "cannot read configuration /nonexistent/x.yaml");
        assert!(load::<Example>(None, &[Path::new("/nonexistent/x.yaml")]).unwrap().path.is_none());
    }

    #[test]
    fn a_file_that_others_may_write_or_own_is_a_strangers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(!is_strangers(file.path()) && !is_strangers(Path::new("/nonexistent")));
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o666)).unwrap();
        assert!(is_strangers(file.path()));
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o644)).unwrap();
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(file.path(), Some(4242), None).unwrap();
            assert!(is_strangers(file.path()));
        }
    }

    #[test]
    fn what_is_nested_without_end_is_refused_at_once() {
        let begun = std::time::Instant::now();
        let text = wrong(&format!("etcd:\n  host: {}", "[".repeat(100_000)));
        assert!(text.starts_with("compute.yaml:2: more than 1000 brackets are open"), "{text}");
        assert!(begun.elapsed() < std::time::Duration::from_secs(1));
        assert!(parse::<Example>(&format!("# {}\n", "[".repeat(500)), Path::new("x")).is_ok());
    }

    #[test]
    fn a_secret_that_everybody_may_read_is_told() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let told = |mode: u32| {
            fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
            exposed([file.path(), Path::new("/nonexistent")])
        };
        assert_eq!(told(0o644).len(), 1);
        assert_eq!(told(0o604).len(), 1);
        assert!(told(0o640).is_empty());
    }

    #[test]
    fn secrets_do_not_show() {
        let config: Example = parse("etcd: {host: a, port: 1, password: hunter2}", Path::new("x")).unwrap();
        assert!(!format!("{config:?}").contains("hunter2"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "[ -~\n]{0,200}") {
            let _ = parse::<Example>(&text, Path::new("x"));
        }
    }
}
