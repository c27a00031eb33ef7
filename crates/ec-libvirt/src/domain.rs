//! Domains: whose they are, whether they run, starting and ending them.

use std::{
    os::{fd::AsRawFd, unix::net::UnixStream},
    sync::Mutex,
};

use ec_hypervisor::{DomainSpec, End, HypervisorError, Pause, Room, RunState};
use ec_model::{InstanceId, NodeId};
use virt::{
    connect::Connect,
    domain::{Domain, DomainPausedReason, DomainShutoffReason, DomainState, DomainStateReason},
    enumutil::Enum,
    error::{Error, ErrorNumber},
    sys,
};

use crate::{
    disk::impassable_ancestor,
    error::{CallError, absent, has_code, is_connection_error, is_refusal, said},
    lane::locked,
    sys::{backup, has_lost_backup, saved_xml},
    xml::{self, MARK_NAMESPACE, Mark, MemoryXml},
};

/// The domain of an instance, by whose mark it carries.
pub(crate) enum Found {
    Ours(Domain),
    Foreign,
    Nothing,
}

/// Looks the instance's domain up.
pub(crate) fn find(connect: &Connect, node: NodeId, instance: InstanceId) -> Result<Found, Error> {
    let domain = absent(connect.lookup_domain_by_uuid(instance.uuid()), ErrorNumber::NoDomain)?;
    let Some(domain) = domain else { return Ok(Found::Nothing) };
    Ok(match whose(&domain, node)? {
        Whose::Ours(_) => Found::Ours(domain),
        Whose::Foreign => Found::Foreign,
        Whose::Nobodys => Found::Nothing,
    })
}

/// The instance's domain where its guest is up.
pub(crate) fn up(connect: &Connect, node: NodeId, instance: InstanceId) -> Result<Option<Domain>, Error> {
    Ok(match find(connect, node, instance)? {
        Found::Ours(domain) if domain.is_active()? => Some(domain),
        Found::Ours(_) | Found::Foreign | Found::Nothing => None,
    })
}

/// Whose a domain is.
pub(crate) enum Whose {
    /// It carries our mark with our node: that of how it was started, where it is up.
    Ours(Mark),
    Foreign,
    /// It went meanwhile. Taken for another's, its disk would be none of ours.
    Nobodys,
}

/// Looks whose the domain is.
pub(crate) fn whose(domain: &Domain, node: NodeId) -> Result<Whose, Error> {
    let kind = sys::VIR_DOMAIN_METADATA_ELEMENT.try_into().unwrap_or_default();
    match domain.metadata(kind, Some(MARK_NAMESPACE), 0) {
        Ok(element) => Ok(match xml::mark(&element).filter(|mark| mark.node == node) {
            Some(mark) => Whose::Ours(mark),
            None => Whose::Foreign,
        }),
        Err(error) if has_code(&error, ErrorNumber::NoDomainMetadata) => Ok(Whose::Foreign),
        Err(error) if has_code(&error, ErrorNumber::NoDomain) => Ok(Whose::Nobodys),
        Err(error) => Err(error),
    }
}

/// Has the guest's screen speak on a socket.
pub(crate) fn open_graphics(
    connect: &Connect,
    node: NodeId,
    instance: InstanceId,
    socket: &UnixStream,
) -> Result<(), CallError> {
    let domain = match find(connect, node, instance)? {
        Found::Ours(domain) if domain.is_active()? => domain,
        Found::Ours(_) => return Err(CallError::Refused("the guest does not run".into())),
        Found::Foreign => return Err(foreign(node, instance)),
        Found::Nothing => return Err(CallError::Refused("there is no such domain".into())),
    };
    // In a title it would be escaped.
    if !domain.xml_desc(0)?.contains("<graphics ") {
        let why = "the guest has none; those have one that are built while `libvirt.graphics` of compute.yaml is `vnc`";
        return Err(CallError::Refused(why.into()));
    }
    // Whoever has a ticket needs no password of VNC's own.
    Ok(domain.open_graphics(0, socket.as_raw_fd(), sys::VIR_DOMAIN_OPEN_GRAPHICS_SKIPAUTH)?)
}

/// Whether it is up from its rescue disk by its mark, or was saved so.
pub(crate) fn is_rescued(domain: &Domain, mark: &Mark, state: RunState) -> Result<bool, Error> {
    Ok(match state {
        RunState::Running | RunState::Paused(_) => mark.rescued,
        RunState::Saved => was_rescued(domain)?,
        RunState::NotStarted | RunState::Ended(_) => false,
    })
}

/// Whether the guest goes on from memory that was saved with the domain: not from what a power cut left of it, which libvirt throws
/// away at the next start.
pub(crate) fn is_saved(domain: &Domain) -> Result<bool, Error> {
    let is_torn = || saved_xml(domain).is_err_and(|error| has_code(&error, ErrorNumber::OperationFailed));
    Ok(domain.has_managed_save(0)? && !is_torn())
}

/// The document of the guest whose memory was saved with the domain; none where that tells nothing.
pub(crate) fn saved_document(domain: &Domain) -> Result<Option<String>, Error> {
    if !domain.has_managed_save(0)? {
        return Ok(None);
    }
    match saved_xml(domain) {
        Ok(document) => Ok(Some(document)),
        Err(error) if has_code(&error, ErrorNumber::NoDomain) || is_connection_error(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Whether the memory that was saved with the domain is of a guest that was up from its rescue disk. What a power cut left of it tells
/// nothing: no look may fail for it.
fn was_rescued(domain: &Domain) -> Result<bool, Error> {
    Ok(saved_document(domain)?.is_some_and(|document| xml::is_rescued(&document)))
}

/// An error where a guest is up from its rescue disk; memory that was saved of such a guest goes.
pub(crate) fn leave_rescue(connect: &Connect, node: NodeId, instance: InstanceId) -> Result<(), CallError> {
    let domain = match find(connect, node, instance)? {
        Found::Ours(domain) => domain,
        Found::Foreign => return Err(foreign(node, instance)),
        Found::Nothing => return Ok(()),
    };
    if domain.is_active()? {
        return match whose(&domain, node)? {
            Whose::Ours(Mark { rescued: true, .. }) => {
                Err(CallError::Refused("the guest is up from it".into()))
            }
            _ => Ok(()),
        };
    }
    if was_rescued(&domain)? {
        domain.managed_save_remove(0)?;
    }
    Ok(())
}

/// Starts the domain as that document has it, once; or from its saved memory. Running already is not an error.
pub(crate) fn start_as(
    connect: &Connect,
    node: NodeId,
    instance: InstanceId,
    document: &str,
) -> Result<(), CallError> {
    let domain = ours(connect, node, instance)?;
    if is_saved(&domain)? {
        return start(connect, node, instance);
    }
    match connect.create_domain_xml(&as_named(&domain, instance, document)?, 0) {
        Ok(_) => Ok(()),
        // Already, or somebody else was faster.
        Err(_) if domain.is_active().unwrap_or(false) => Ok(()),
        Err(error) => Err(with_hint(error)),
    }
}

/// The document with the name that somebody gave the domain since: libvirt takes none that calls it otherwise.
pub(crate) fn as_named(domain: &Domain, instance: InstanceId, document: &str) -> Result<String, Error> {
    let name = domain.name()?;
    let called = |name: &str| format!("<name>{}</name>", quick_xml::escape::escape(name));
    Ok(document.replacen(&called(&instance.to_string()), &called(&name), 1))
}

/// Why a domain with another mark is not worked on, and what helps.
pub(crate) fn foreign(node: NodeId, instance: InstanceId) -> CallError {
    CallError::Refused(format!(
        "there is a domain with the uuid {instance} that does not carry this node's mark, so it is left alone: {}",
        ec_model::mark_again(&instance.to_string(), &node.to_string())
    ))
}

/// What libvirt says of the domain; `None` where it went meanwhile. `room` is asked only of one that is paused
/// by an I/O error.
pub(crate) fn run_state(domain: &Domain, room: impl FnOnce() -> bool) -> Result<Option<RunState>, Error> {
    let (state, reason) = domain.state()?;
    let state = match state {
        Enum::Known(DomainState::Shutoff) => match reason {
            // libvirtd forgets the reason when it is started anew, and the file stays.
            _ if is_saved(domain)? => RunState::Saved,
            Enum::Known(DomainStateReason::Shutoff(Enum::Known(why))) => shut_off(why),
            _ => RunState::Ended(End::Unknown),
        },
        Enum::Known(DomainState::Crashed) => RunState::Ended(End::Crashed),
        Enum::Known(DomainState::Paused) => match reason {
            Enum::Known(DomainStateReason::Paused(Enum::Known(why))) => paused(why, room),
            _ => RunState::Paused(Pause::Other),
        },
        // Blocked, shutting down, asleep by its own wish: there is a process, and it holds the disk.
        Enum::Known(_) => RunState::Running,
        // The bindings drop the error of this call and return a state that does not exist.
        Enum::Unknown(_) => {
            let error = Error::last_error();
            return if crate::error::has_code(&error, ErrorNumber::NoDomain) { Ok(None) } else { Err(error) };
        }
    };
    Ok(Some(state))
}

fn shut_off(why: DomainShutoffReason) -> RunState {
    match why {
        // A start that failed is no run, and neither is a definition.
        DomainShutoffReason::Unknown | DomainShutoffReason::Failed => RunState::NotStarted,
        DomainShutoffReason::Shutdown => RunState::Ended(End::ByGuest),
        // Where its memory went, or which disk a snapshot brought, whoever did it knows.
        DomainShutoffReason::Destroyed
        | DomainShutoffReason::Saved
        | DomainShutoffReason::Migrated
        | DomainShutoffReason::FromSnapshot => RunState::Ended(End::ByHand),
        DomainShutoffReason::Crashed => RunState::Ended(End::Crashed),
        DomainShutoffReason::Daemon => RunState::Ended(End::ByHypervisor),
    }
}

fn paused(why: DomainPausedReason, room: impl FnOnce() -> bool) -> RunState {
    RunState::Paused(match why {
        DomainPausedReason::IOError => Pause::Storage { room: room() },
        DomainPausedReason::User => Pause::ByHand,
        DomainPausedReason::Crashed | DomainPausedReason::Watchdog => Pause::Crashed,
        // Every start and end passes through these.
        DomainPausedReason::StartingUp | DomainPausedReason::ShuttingDown => return RunState::Running,
        // Whoever migrates, dumps or saves lets it go on, or has it elsewhere already: never ours to resume.
        _ => Pause::Other,
    })
}

/// The domain, which must be there and ours.
pub(crate) fn ours(connect: &Connect, node: NodeId, instance: InstanceId) -> Result<Domain, CallError> {
    match find(connect, node, instance)? {
        Found::Ours(domain) => Ok(domain),
        Found::Foreign => Err(foreign(node, instance)),
        Found::Nothing => Err(CallError::Refused("there is no such domain".into())),
    }
}

/// Lets a paused domain go on; running already is not an error.
pub(crate) fn resume(connect: &Connect, node: NodeId, instance: InstanceId) -> Result<(), CallError> {
    let domain = ours(connect, node, instance)?;
    match domain.state()?.0 {
        Enum::Known(DomainState::Paused) => Ok(domain.resume().map(drop)?),
        _ => Ok(()),
    }
}

/// What libvirt says of a call that waited for a domain's lock in vain.
const LOCKED: &str = "cannot acquire state change lock";

/// What helps where libvirt lost track of a backup of a guest that is up.
pub(crate) const LOST_BACKUP: &str = "libvirtd was ended as it began to copy disks of this guest, and waits for the end of that: stop the guest (`eschedule stop --grace 0`), and then start libvirtd anew";

/// And where the guest is down by now.
const LOST_WORK: &str = "libvirtd waits for the end of what it did to this guest before: it has to be started anew, and running guests go on";

/// Why no call about this domain comes back, where libvirt lost track of one; `error` is what became of the last.
pub(crate) fn held(
    connect: &Connect,
    instance: InstanceId,
    error: &HypervisorError,
) -> Result<Option<&'static str>, CallError> {
    let Some(domain) = absent(connect.lookup_domain_by_uuid(instance.uuid()), ErrorNumber::NoDomain)? else {
        return Ok(None);
    };
    Ok(match domain.is_active()? {
        true => has_lost_backup(&domain).then_some(LOST_BACKUP),
        false => error.to_string().contains(LOCKED).then_some(LOST_WORK),
    })
}

/// Presses the guest's power button; what does not run is not an error.
pub(crate) fn shut_down(connect: &Connect, node: NodeId, instance: InstanceId) -> Result<(), CallError> {
    let domain = ours(connect, node, instance)?;
    // The button itself, whether an agent in the guest answers or not: one that is asked may hang.
    unless_ended(&domain, domain.shutdown_flags(sys::VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN).map(drop))
}

/// Ends the domain hard; what does not run is not an error.
pub(crate) fn power_off(connect: &Connect, node: NodeId, instance: InstanceId) -> Result<(), CallError> {
    let domain = ours(connect, node, instance)?;
    unless_ended(&domain, domain.destroy())
}

/// The libvirtd of the system, and where it saves guests' memory.
const SYSTEM: &str = "qemu:///system";
const SAVES: &str = "/var/lib/libvirt/qemu/save";

/// So much stays free beside a guest's memory, for all others who write there.
const ROOM_BESIDE: u64 = 1 << 30;

/// How much of its memory the guest has used, and its process beside: no more than that is saved. Nothing where it does not run.
fn resident_bytes(domain: &Domain) -> Option<u64> {
    let stats = domain.memory_stats(0).ok()?;
    // libvirt counts in KiB.
    let resident = stats.iter().find(|stat| stat.tag == sys::VIR_DOMAIN_MEMORY_STAT_RSS)?;
    Some(resident.val << 10)
}

/// What the guests take, in bytes, whose memory is being saved: of each all, however much of it is written by now.
#[derive(Debug, Default)]
pub(crate) struct Saves(Mutex<u64>);

/// A part of that, until the save is over.
#[derive(Debug)]
struct Save<'a>(&'a Saves, u64);

impl Drop for Save<'_> {
    fn drop(&mut self) {
        *locked(&self.0.0) -= self.1;
    }
}

impl Saves {
    /// One more, of a guest that takes so much, where as much is free as is found then; or why there is no room for that.
    fn begin(&self, takes: u64, free: impl FnOnce() -> Option<u64>) -> Result<Save<'_>, String> {
        let mut others = locked(&self.0);
        let free = free().unwrap_or(u64::MAX);
        if free < others.saturating_add(takes).saturating_add(ROOM_BESIDE) {
            let [free, others, takes, beside] = [free, *others, takes, ROOM_BESIDE].map(|bytes| bytes >> 20);
            let others = match others {
                0 => String::new(),
                others => format!(", {others} MiB of them for others whose memory is being saved"),
            };
            return Err(format!(
                "{free} MiB are free below {SAVES}{others}: its memory takes up to {takes} MiB, and {beside} MiB are to stay free beside it"
            ));
        }
        *others += takes;
        Ok(Save(self, takes))
    }
}

/// Writes the guest's memory beside libvirt's other files and ends it, so that the next start lets it run, also where
/// it is paused now. What does not run is not an error.
pub(crate) fn save(
    connect: &Connect,
    node: NodeId,
    instance: InstanceId,
    saves: &Saves,
) -> Result<(), CallError> {
    let domain = ours(connect, node, instance)?;
    // libvirt would wait for the end of a copy, as long as it waits for anything.
    if domain.is_active()? && backup(&domain)?.is_some() {
        return Err(CallError::NotNow("a disk of it is being copied".into()));
    }
    // It would halt the guest, fill the file system to the last byte, to which others write, too, and let the guest go on: at each try.
    let _save = if connect.uri().is_ok_and(|uri| uri == SYSTEM)
        && let Some(takes) = resident_bytes(&domain)
    {
        let free = || {
            let stat = nix::sys::statvfs::statvfs(SAVES).ok()?;
            Some(stat.blocks_available() * stat.fragment_size())
        };
        Some(saves.begin(takes, free).map_err(CallError::NotNow)?)
    } else {
        None
    };
    unless_ended(&domain, domain.managed_save(sys::VIR_DOMAIN_SAVE_RUNNING).map(drop))
}

/// The instance's domain, where there is one; an error where that is up.
pub(crate) fn down(
    connect: &Connect,
    node: NodeId,
    instance: InstanceId,
) -> Result<Option<Domain>, CallError> {
    match find(connect, node, instance)? {
        Found::Ours(domain) if domain.is_active()? => Err(CallError::Refused("the guest is up".into())),
        Found::Ours(domain) => Ok(Some(domain)),
        Found::Foreign => Err(foreign(node, instance)),
        Found::Nothing => Ok(None),
    }
}

/// Deletes memory that was saved, since it is of a disk that goes, or is not wanted. An error where the domain is up.
pub(crate) fn forget_memory(connect: &Connect, node: NodeId, instance: InstanceId) -> Result<(), CallError> {
    if let Some(domain) = down(connect, node, instance)?
        && domain.has_managed_save(0)?
    {
        domain.managed_save_remove(0)?;
    }
    Ok(())
}

/// Defines the domain as large as the spec, as [`define_resized`] has it. An error where it is up or goes on from saved memory, so
/// that it has the size that it was started with.
pub(crate) fn redefine(
    connect: &Connect,
    node: NodeId,
    spec: &DomainSpec,
    document: &str,
) -> Result<(), CallError> {
    let domain = ours(connect, node, spec.instance)?;
    if domain.is_active()? {
        return Err(CallError::Refused("the guest is up".into()));
    }
    if is_saved(&domain)? {
        return Err(CallError::Refused("the guest's memory is saved, and goes on as large as it was".into()));
    }
    define_resized(&domain, spec, document, |document| {
        connect.define_domain_xml(document)?;
        Ok(())
    })
}

/// Defines the domain that is there as large as the spec, and otherwise as it is defined: an operator may have changed it. Where that
/// cannot be, as `document` has it, which is told.
fn define_resized(
    domain: &Domain,
    spec: &DomainSpec,
    document: &str,
    define: impl Fn(&str) -> Result<(), CallError>,
) -> Result<(), CallError> {
    let document = &as_named(domain, spec.instance, document)?;
    // One that somebody undefined is defined as nothing.
    if !domain.is_persistent()? {
        return define(document);
    }
    let is = domain.xml_desc(sys::VIR_DOMAIN_XML_INACTIVE | sys::VIR_DOMAIN_XML_SECURE)?;
    let why = match xml::resized(&is, spec) {
        Ok(resized) => match define(&resized) {
            Err(CallError::Libvirt(error)) if is_refusal(&error) => error.message().to_owned(),
            defined => return defined,
        },
        Err(why) => why,
    };
    define(document)?;
    tracing::warn!(
        instance = %spec.instance,
        why,
        "its domain could not be given another size as it was defined, and is defined anew: but for volumes, all that others changed of it is gone"
    );
    Ok(())
}

/// Defines for good, as that document has it, the domain that is up.
pub(crate) fn persist(
    connect: &Connect,
    node: NodeId,
    instance: InstanceId,
    document: &str,
) -> Result<(), CallError> {
    let persisted = (|| match find(connect, node, instance)? {
        Found::Ours(domain) if domain.is_persistent()? => Ok(()),
        Found::Ours(domain) if domain.is_active()? => {
            define_up(connect, &as_named(&domain, instance, document)?)
        }
        Found::Ours(_) | Found::Nothing => Err(ended()),
        Found::Foreign => Err(foreign(node, instance)),
    })();
    or_ended(connect, node, instance, persisted)
}

fn ended() -> CallError {
    CallError::NotNow("it ended, and libvirt has forgotten it".into())
}

/// Defines a domain that was up just now.
fn define_up(connect: &Connect, document: &str) -> Result<(), CallError> {
    let defined = connect.define_domain_xml(document)?;
    // Of one that was undefined, and ended in between, a new one was made, of which nobody could tell what became of its
    // guest.
    if run_state(&defined, || false)? == Some(RunState::NotStarted) {
        defined.undefine()?;
        return Err(ended());
    }
    Ok(())
}

/// It may end between any two calls, and what libvirt says of the second then is of many words.
fn or_ended(
    connect: &Connect,
    node: NodeId,
    instance: InstanceId,
    done: Result<(), CallError>,
) -> Result<(), CallError> {
    let has_ended = || match find(connect, node, instance) {
        Ok(Found::Ours(domain)) => domain.is_active().is_ok_and(|is_active| !is_active),
        Ok(Found::Foreign | Found::Nothing) => true,
        Err(_) => false,
    };
    match done {
        Err(CallError::Libvirt(_)) if has_ended() => Err(ended()),
        done => done,
    }
}

/// Adds processors and memory to the domain that is up, as far as it has them not, and defines it so for good.
pub(crate) fn grow(
    connect: &Connect,
    node: NodeId,
    spec: &DomainSpec,
    document: &str,
) -> Result<(), CallError> {
    let domain = ours(connect, node, spec.instance)?;
    let define = || define_resized(&domain, spec, document, |document| define_up(connect, document));
    let grown = add(&domain, spec).and_then(|()| define());
    or_ended(connect, node, spec.instance, grown)
}

/// Adds what it has less.
fn add(domain: &Domain, spec: &DomainSpec) -> Result<(), CallError> {
    let refused = |why: &str| Err(CallError::Refused(why.into()));
    if !domain.is_active()? {
        return refused("the guest does not run");
    }
    let info = domain.info()?;
    // libvirt counts in KiB.
    let (vcpus, memory_mb) = (u64::from(info.nr_virt_cpu), info.max_mem.div_ceil(1024));
    let Some(more) = spec.memory_mb.checked_sub(memory_mb).filter(|_| vcpus <= spec.vcpus) else {
        return refused("nothing is taken from a guest that runs");
    };
    if more % Room::MEMORY_STEP_MB != 0 {
        return refused("a guest that runs takes memory in whole blocks");
    }
    // It knows what the guest was started with room for.
    if vcpus < spec.vcpus {
        let wanted = u32::try_from(spec.vcpus).unwrap_or(u32::MAX);
        domain.set_vcpus_flags(wanted, sys::VIR_DOMAIN_VCPU_LIVE)?;
    }
    if more > 0 {
        let memory = xml::write(&MemoryXml::new(more)).map_err(CallError::Refused)?;
        domain.attach_device_flags(&memory, sys::VIR_DOMAIN_AFFECT_LIVE)?;
    }
    Ok(())
}

/// Halts the domain; halted already is not an error.
pub(crate) fn pause(connect: &Connect, node: NodeId, instance: InstanceId) -> Result<(), CallError> {
    let domain = ours(connect, node, instance)?;
    match domain.state()?.0 {
        Enum::Known(DomainState::Paused) => Ok(()),
        _ => Ok(domain.suspend().map(drop)?),
    }
}

/// What came of ending a domain: that it has ended by itself in between is as good.
fn unless_ended(domain: &Domain, ended: Result<(), Error>) -> Result<(), CallError> {
    match ended {
        Err(error) if domain.is_active()? => Err(error.into()),
        _ => Ok(()),
    }
}

/// Starts the domain; running already is not an error.
pub(crate) fn start(connect: &Connect, node: NodeId, instance: InstanceId) -> Result<(), CallError> {
    let domain = ours(connect, node, instance)?;
    match domain.create() {
        Ok(()) => Ok(()),
        // Already, or somebody else was faster.
        Err(_) if domain.is_active().unwrap_or(false) => Ok(()),
        Err(error) => Err(with_hint(error)),
    }
}

/// qemu does not run as root, and is stopped by directories that root does not notice.
fn with_hint(error: Error) -> CallError {
    let message = said(&error);
    if !message.contains("Permission denied") {
        return error.into();
    }
    let path = message.split('\'').find(|part| part.starts_with('/'));
    let directory = path.and_then(|path| impassable_ancestor(path.as_ref()));
    CallError::Refused(match directory {
        Some(directory) => format!(
            "{message}; qemu runs as another user, who may not pass {0}: chmod o+x {0}",
            directory.display()
        ),
        None => format!("{message}; qemu runs as another user, who must be able to read it"),
    })
}

/// Ends the domain hard and undefines it; what is not there is not an error. What goes with the domain `beside` finds, and `delete`
/// deletes in between: afterwards nobody knows of it.
pub(crate) fn remove<T>(
    connect: &Connect,
    node: NodeId,
    instance: InstanceId,
    beside: impl FnOnce(&Domain) -> Result<T, CallError>,
    delete: impl FnOnce(T) -> Result<(), CallError>,
) -> Result<(), CallError> {
    let domain = match find(connect, node, instance)? {
        Found::Ours(domain) => domain,
        Found::Foreign => return Err(foreign(node, instance)),
        Found::Nothing => return Ok(()),
    };
    let found = beside(&domain)?;
    if let Err(error) = domain.destroy() {
        // Ended by itself in between is as good.
        let gone = absent(domain.is_active(), ErrorNumber::NoDomain)? != Some(true);
        if !gone {
            return Err(error.into());
        }
    }
    delete(found)?;
    let everything = sys::VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
        | sys::VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
        | sys::VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
        | sys::VIR_DOMAIN_UNDEFINE_NVRAM;
    absent(domain.undefine_flags(everything), ErrorNumber::NoDomain)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_saved_where_room_stays_beside_it() {
        let gib = 1 << 30;
        let saves = Saves::default();
        let begin = |free, takes| saves.begin(takes, || Some(free));
        let why = begin(3 * gib - 1, 2 * gib).unwrap_err();
        assert!(why.contains("3071 MiB are free below /") && why.contains("up to 2048 MiB"), "{why}");
        assert!(!why.contains("others whose"), "{why}");
        let first = begin(3 * gib, 2 * gib).unwrap();
        // What the first has written by then is counted twice, and is waited for.
        let why = begin(4 * gib - 1, gib).unwrap_err();
        assert!(why.contains("4095 MiB are free") && why.contains("2048 MiB of them for others"), "{why}");
        let second = begin(4 * gib, gib).unwrap();
        begin(4 * gib, 1).unwrap_err();
        drop(first);
        drop(second);
        begin(gib + 1, 1).unwrap();
    }

    #[test]
    fn where_a_guest_went_by_hand_is_left_to_whoever_did_it() {
        use DomainShutoffReason::{Crashed, Destroyed, FromSnapshot, Migrated, Saved};
        for (why, end) in [
            (Destroyed, End::ByHand),
            (Saved, End::ByHand),
            (Migrated, End::ByHand),
            (FromSnapshot, End::ByHand),
            (Crashed, End::Crashed),
        ] {
            assert_eq!(shut_off(why), RunState::Ended(end), "{why:?}");
        }
    }

    #[test]
    fn a_domain_is_defined_by_the_name_that_somebody_gave_it() {
        let connect = Connect::open(Some("test:///default")).unwrap();
        let instance: InstanceId = "8d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        let document = format!(
            "<domain type='test'><name>{instance}</name><uuid>{instance}</uuid><memory>8192</memory><os><type>hvm</type></os></domain>"
        );
        let domain = connect.define_domain_xml(&document).unwrap();
        domain.rename("a <name> & another", 0).unwrap();
        assert!(connect.define_domain_xml(&document).is_err(), "which is why");
        let domain = connect.lookup_domain_by_uuid(instance.uuid()).unwrap();
        let named = as_named(&domain, instance, &document).unwrap();
        connect.define_domain_xml(&named).unwrap();
        assert_eq!(domain.name().unwrap(), "a <name> & another");
    }

    #[test]
    fn what_ended_before_it_was_defined_for_good_is_not_left_as_if_it_never_ran() {
        // libvirt's own driver for tests: its domains are of no QEMU.
        let connect = Connect::open(Some("test:///default")).unwrap();
        let document = "<domain type='test'><name>web</name><uuid>7d3c1f0a-2b4e-4c55-9a7e-0123456789ab</uuid><memory>8192</memory><os><type>hvm</type></os></domain>";
        assert!(matches!(define_up(&connect, document), Err(CallError::NotNow(_))));
        assert!(connect.lookup_domain_by_name("web").is_err(), "nothing is left");
        let domain = connect.create_domain_xml(document, 0).unwrap();
        define_up(&connect, document).unwrap();
        assert!(domain.is_persistent().unwrap() && domain.is_active().unwrap());
    }
}
