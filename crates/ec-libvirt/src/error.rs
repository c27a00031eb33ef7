//! From libvirt's errors to what the agent can do about them.

use ec_hypervisor::HypervisorError;
use ec_runtime::may_pass;
use jiff::Timestamp;
use virt::error::{Error, ErrorDomain, ErrorNumber};

/// Why work on a connection did not succeed.
#[derive(Debug)]
pub(crate) enum CallError {
    /// libvirt's error.
    Libvirt(Error),
    /// Our own refusal, or a failure beside libvirt.
    Refused(String),
    /// Something beside libvirt that may work later.
    NotNow(String),
}

impl From<Error> for CallError {
    fn from(error: Error) -> Self {
        Self::Libvirt(error)
    }
}

impl CallError {
    /// A failure of the file system: for now, where it may pass. Nothing is wrong with the instance then, and nothing of it is given up.
    pub(crate) fn io(doing: &str, path: &std::path::Path, error: &std::io::Error) -> Self {
        let why = format!("could not {doing} {}: {error}", path.display());
        match may_pass(error) {
            true => Self::NotNow(why),
            false => Self::Refused(why),
        }
    }

    /// The same, for now where it would be for good.
    pub(crate) fn for_now(self) -> Self {
        match self {
            // Of these more is known.
            Self::Libvirt(error) if is_connection_error(&error) || is_overdue(&error) => Self::Libvirt(error),
            Self::Libvirt(error) => Self::NotNow(said(&error)),
            Self::Refused(why) | Self::NotNow(why) => Self::NotNow(why),
        }
    }

    /// In the terms of the trait. `lost` tells that the connection is gone, whatever the error says.
    pub(crate) fn classify(self, what: &str, uri: &str, seconds: u64, lost: bool) -> HypervisorError {
        match self {
            Self::Refused(detail) => HypervisorError::Failed { what: what.to_owned(), detail },
            Self::NotNow(detail) => HypervisorError::NotNow { what: what.to_owned(), detail },
            Self::Libvirt(error) if lost => unreachable(uri, said(&error)),
            // The daemon answers, and cannot reach another that it needs: virtlogd, say.
            Self::Libvirt(error) if is_connection_error(&error) => {
                HypervisorError::NotNow { what: what.to_owned(), detail: said(&error) }
            }
            // libvirtd's own deadlines: another call holds the domain, or its process does not die.
            Self::Libvirt(error) if is_overdue(&error) => {
                HypervisorError::TimedOut { what: format!("the call to {what} ({})", said(&error)), seconds }
            }
            Self::Libvirt(error) => HypervisorError::Failed { what: what.to_owned(), detail: said(&error) },
        }
    }
}

/// What libvirt says of an error, the same of the same one whenever it comes: what is tried again and again would else be news each time.
pub(crate) fn said(error: &Error) -> String {
    alike(error.message())
}

/// QEMU begins each of its lines with when it wrote that, and libvirt passes them on; behind one of two sentences, as it happens to
/// notice first that QEMU has ended.
fn alike(message: &str) -> String {
    let words = message.split_inclusive([' ', '\n']);
    let words: String = words.filter(|word| word.trim_end().parse::<Timestamp>().is_err()).collect();
    words.replacen("qemu unexpectedly closed the monitor", "process exited while connecting to monitor", 1)
}

/// The hypervisor cannot be reached at `uri`.
pub(crate) fn unreachable(uri: &str, detail: String) -> HypervisorError {
    HypervisorError::Unreachable { uri: uri.to_owned(), detail }
}

/// Whether libvirt gave this number to its error.
pub(crate) fn has_code(error: &Error, code: ErrorNumber) -> bool {
    error.code().is(code)
}

/// Errors of the transport come from the RPC code; errors about domains and volumes come from elsewhere.
pub(crate) fn is_connection_error(error: &Error) -> bool {
    error.domain().is(ErrorDomain::Rpc)
        || [ErrorNumber::NoConnect, ErrorNumber::InvalidConn, ErrorNumber::Rpc]
            .into_iter()
            .any(|code| has_code(error, code))
}

/// Whether libvirtd waited in vain for another call.
fn is_overdue(error: &Error) -> bool {
    has_code(error, ErrorNumber::OperationTimeout) || has_code(error, ErrorNumber::ResourceBusy)
}

/// Whether libvirt refused a document for what it says, and would at any time.
pub(crate) fn is_refusal(error: &Error) -> bool {
    use ErrorNumber::{ConfigUnsupported, InvalidArg, XmlDetail, XmlError, XmlInvalidSchema};
    [XmlError, XmlDetail, XmlInvalidSchema, ConfigUnsupported, InvalidArg]
        .into_iter()
        .any(|code| has_code(error, code))
}

/// What came of something for which QEMU opens images: for now, where somebody else has a lock on one of them. That may be gone when
/// it is looked for, so that what QEMU says counts, in no language but its own (`block/file-posix.c`).
pub(crate) fn unless_locked(error: Error) -> CallError {
    match says_locked(error.message()) {
        true => CallError::NotNow(said(&error)),
        false => error.into(),
    }
}

fn says_locked(message: &str) -> bool {
    let after = |start| message.split_once(start).map(|(_, after)| after);
    let lock = after("Failed to get \"").or_else(|| after("Failed to get shared \""));
    lock.and_then(|lock| lock.split_once('"')).is_some_and(|(_, after)| after.starts_with(" lock"))
}

/// Turns "there is no such thing" into `None`.
pub(crate) fn absent<T>(result: Result<T, Error>, code: ErrorNumber) -> Result<Option<T>, Error> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if has_code(&error, code) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use virt::connect::Connect;

    use nix::errno::Errno;

    use super::*;

    #[test]
    fn a_daemon_that_is_gone_is_unreachable_and_one_that_misses_another_says_not_now() {
        virt::error::clear_error_callback();
        let uri = "qemu+unix:///system?socket=/nonexistent/libvirt-sock";
        let failed = || CallError::from(Connect::open(Some(uri)).expect_err("there is no daemon"));
        let error = failed().classify("start domain x", uri, 1, false);
        assert!(matches!(error, HypervisorError::NotNow { .. }), "{error}");
        let error = failed().classify("connect", uri, 1, true);
        assert!(matches!(error, HypervisorError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains(uri), "{error}");
    }

    #[test]
    fn a_file_system_in_trouble_is_waited_for_and_what_it_refuses_is_not() {
        let failed = |errno| CallError::io("look at", "/x".as_ref(), &std::io::Error::from(errno));
        assert!(matches!(failed(Errno::ENOTCONN), CallError::NotNow(_)));
        assert!(matches!(failed(Errno::ELOOP), CallError::Refused(_)));
    }

    #[test]
    fn an_image_that_another_has_locked_is_told_from_all_else_that_qemu_fails_of() {
        for (message, is_so) in [
            (
                "internal error: process exited: -blockdev {\"x\":\"y\"}: Failed to get \"write\" lock\nIs another",
                true,
            ),
            (
                "unable to execute QEMU command 'blockdev-add': Failed to get shared \"consistent read\" lock",
                true,
            ),
            ("Failed to get \"write", false),
            ("Failed to get \"write\" access", false),
            ("cannot acquire state change lock", false),
        ] {
            assert_eq!(says_locked(message), is_so, "{message}");
        }
    }

    #[test]
    fn what_qemu_says_twice_is_the_same() {
        let at = |time: &str| {
            format!(
                "internal error: process exited while connecting to monitor: {time} qemu-system-x86_64: -m 9T: cannot\n{time} qemu-system-x86_64: at 12:30 Z\n"
            )
        };
        let said = alike(&at("2026-11-29T01:59:24.316731Z"));
        let later = at("2026-11-29T02:00:01.000009Z");
        assert_eq!(said, alike(&later));
        let closed = later.replace("process exited while connecting to", "qemu unexpectedly closed the");
        assert!(closed != later && said == alike(&closed));
        assert_eq!(
            said,
            "internal error: process exited while connecting to monitor: qemu-system-x86_64: -m 9T: cannot\nqemu-system-x86_64: at 12:30 Z\n"
        );
    }

    #[test]
    fn what_libvirt_refuses_is_a_failure_unless_the_connection_is_gone() {
        virt::error::clear_error_callback();
        let connect = Connect::open(Some("test:///default")).unwrap();
        let refused = || CallError::from(connect.define_domain_xml("<domain/>").expect_err("bad XML"));
        assert!(!refused().classify("define domain x", "test:", 1, false).is_transient());
        assert!(refused().classify("define domain x", "test:", 1, true).is_transient());
        let missing = absent(connect.lookup_domain_by_name("no such"), ErrorNumber::NoDomain);
        assert!(missing.unwrap().is_none());
    }
}
