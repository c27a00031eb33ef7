//! Where the `virt` crate falls short: DHCP leases, the guest's agent, backups, and callbacks.
//! The only unsafe code of the workspace; each function is a safe wrapper around one libvirt call.
#![allow(unsafe_code, reason = "libvirt's C interface")]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    ptr,
};

use uuid::Uuid;
use virt::{
    connect::Connect,
    domain::Domain,
    error::{Error, ErrorNumber},
    network::Network,
    sys,
};

use crate::error::has_code;

/// How long libvirtd waits for the answer of a guest agent, in seconds; by default it waits for ever.
const AGENT_TIMEOUT: c_int = 5;

/// Who is about to be asked for more has to be quicker.
const PING_TIMEOUT: c_int = 2;

/// And for its file systems to come to rest: a guest that writes much, or whose databases have hooks for that, takes its time. The call
/// has room for this, a ping before and a thaw after ([`crate::CALL_TIMEOUT`]), also where libvirt has to agree with the agent on where
/// its answers begin, for which it waits five seconds more.
const FREEZE_TIMEOUT: c_int = 15;

/// What a job does, in its statistics: `VIR_DOMAIN_JOB_OPERATION`.
const JOB_OPERATION: &CStr = c"operation";

/// One DHCP lease as libvirt tells it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    /// Hardware address; absent for some DHCPv6 clients.
    pub(crate) mac: Option<String>,
    /// The address given.
    pub(crate) ip: String,
    /// When it ends, in seconds since 1970; 0 or less never ends.
    pub(crate) expires: i64,
}

/// An interface of a guest with its addresses, as the guest's agent tells it.
#[derive(Debug)]
pub(crate) struct GuestInterface {
    /// Hardware address, where it has one.
    pub(crate) mac: Option<String>,
    /// Its addresses.
    pub(crate) ips: Vec<String>,
}

/// # Safety
/// `text` is null or a NUL-terminated string that lives during the call.
unsafe fn owned(text: *const c_char) -> Option<String> {
    // SAFETY: as the caller promises.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// The document of the guest whose memory was saved with the domain.
pub(crate) fn saved_xml(domain: &Domain) -> Result<String, Error> {
    // SAFETY: the domain outlives the call; libvirt returns null or a string that is ours.
    let text = unsafe { sys::virDomainManagedSaveGetXMLDesc(domain.as_ptr(), 0) };
    // SAFETY: as above.
    let document = unsafe { owned(text) };
    // SAFETY: libvirt allocated the string with malloc and left it to us; null is allowed.
    unsafe { free(text.cast()) };
    document.ok_or_else(Error::last_error)
}

/// Every lease of the network, in one call.
pub(crate) fn dhcp_leases(network: &Network) -> Result<Vec<Lease>, Error> {
    let mut leases: *mut sys::virNetworkDHCPLeasePtr = ptr::null_mut();
    // SAFETY: the network outlives the call; libvirt fills `leases` with an array of the count returned.
    let count = unsafe { sys::virNetworkGetDHCPLeases(network.as_ptr(), ptr::null(), &mut leases, 0) };
    let Ok(count) = usize::try_from(count) else { return Err(Error::last_error()) };
    let mut found = Vec::with_capacity(count);
    for index in 0..count {
        // SAFETY: `index` is below the count; each lease and its strings are ours until freed here, once.
        unsafe {
            let lease = *leases.add(index);
            if let Some(ip) = owned((*lease).ipaddr) {
                found.push(Lease { mac: owned((*lease).mac), ip, expires: (*lease).expirytime });
            }
            sys::virNetworkDHCPLeaseFree(lease);
        }
    }
    // SAFETY: libvirt allocated the array with malloc and left it to us; null is allowed.
    unsafe { free(leases.cast()) };
    Ok(found)
}

/// Numbers by libvirt's names.
pub(crate) type Counters = Vec<(String, u64)>;

/// The numbers of each domain that is up. One that is busy with
/// another call is not waited for: some of its counters are left out.
pub(crate) fn counters(connect: &Connect) -> Result<Vec<(Uuid, Counters)>, Error> {
    let kinds =
        sys::VIR_DOMAIN_STATS_CPU_TOTAL | sys::VIR_DOMAIN_STATS_INTERFACE | sys::VIR_DOMAIN_STATS_BLOCK;
    let which = sys::VIR_CONNECT_GET_ALL_DOMAINS_STATS_ACTIVE | sys::VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT;
    let mut records: *mut sys::virDomainStatsRecordPtr = ptr::null_mut();
    // SAFETY: the connection outlives the call; libvirt fills `records` with an array of the count returned.
    let count = unsafe { sys::virConnectGetAllDomainStats(connect.as_ptr(), kinds, &mut records, which) };
    let Ok(count) = usize::try_from(count) else { return Err(Error::last_error()) };
    let mut found = Vec::with_capacity(count);
    for index in 0..count {
        // SAFETY: `index` is below the count; a record, its domain and its `nparams` parameters live until the list is
        // freed; the name of a parameter ends with a NUL within its field, and its type says what the union holds.
        unsafe {
            let record = *records.add(index);
            let mut numbers = Vec::new();
            for number in 0..usize::try_from((*record).nparams).unwrap_or(0) {
                let parameter = (*record).params.add(number);
                if (*parameter).type_ == sys::VIR_TYPED_PARAM_ULLONG as c_int {
                    numbers
                        .extend(owned((*parameter).field.as_ptr()).map(|name| (name, (*parameter).value.ul)));
                }
            }
            found.extend(uuid_of((*record).dom).map(|uuid| (uuid, numbers)));
        }
    }
    // SAFETY: libvirt left the list to us, which ends with a null; it is freed once.
    unsafe { sys::virDomainStatsRecordListFree(records) };
    Ok(found)
}

/// Asks the guest's agent something that it answers at once.
pub(crate) fn ping(domain: &Domain) -> Result<(), Error> {
    answer_within(domain, PING_TIMEOUT);
    // Its own ping would mark the domain as one that was sent arbitrary commands.
    domain.time(0).map(drop)
}

/// Has the guest's agent bring its file systems to rest, until they are thawed.
pub(crate) fn freeze(domain: &Domain) -> Result<(), Error> {
    answer_within(domain, FREEZE_TIMEOUT);
    // SAFETY: the domain outlives the call; no mount points are all of them.
    done(unsafe { sys::virDomainFSFreeze(domain.as_ptr(), ptr::null_mut(), 0, 0) })
}

/// Lets its file systems go on; those that are not at rest are none the worse.
pub(crate) fn thaw(domain: &Domain) -> Result<(), Error> {
    answer_within(domain, AGENT_TIMEOUT);
    // SAFETY: as for `freeze`.
    done(unsafe { sys::virDomainFSThaw(domain.as_ptr(), ptr::null_mut(), 0, 0) })
}

/// How long libvirtd waits from now on for what the domain's agent answers. A refusal leaves it as it was, and the next call will tell.
fn answer_within(domain: &Domain, seconds: c_int) {
    // SAFETY: the domain outlives the call.
    unsafe { sys::virDomainAgentSetResponseTimeout(domain.as_ptr(), seconds, 0) };
}

/// Begins a backup into files that are there.
pub(crate) fn begin_backup(domain: &Domain, document: &str) -> Result<(), Error> {
    let document = CString::new(document).unwrap_or_default();
    let flags = sys::VIR_DOMAIN_BACKUP_BEGIN_REUSE_EXTERNAL;
    // SAFETY: the domain and the document outlive the call; a checkpoint need not be made.
    done(unsafe { sys::virDomainBackupBegin(domain.as_ptr(), document.as_ptr(), ptr::null(), flags) })
}

/// The document of the backup that the domain is at, where it is at one.
pub(crate) fn backup(domain: &Domain) -> Result<Option<String>, Error> {
    // SAFETY: the domain outlives the call; libvirt returns null or a string that is ours.
    let text = unsafe { sys::virDomainBackupGetXMLDesc(domain.as_ptr(), 0) };
    // SAFETY: as above.
    let document = unsafe { owned(text) };
    // SAFETY: libvirt allocated the string with malloc and left it to us; null is allowed.
    unsafe { free(text.cast()) };
    match document.ok_or_else(Error::last_error) {
        Err(error) if has_code(&error, ErrorNumber::NoDomainBackup) => Ok(None),
        document => document.map(Some),
    }
}

/// What the domain is at, or was at last, by these flags: the job's type, and what it does.
fn job(domain: &Domain, flags: u32) -> Result<(c_int, c_int), Error> {
    let (mut kind, mut count, mut operation) = (0, 0, 0);
    let mut parameters: sys::virTypedParameterPtr = ptr::null_mut();
    // SAFETY: the domain outlives the call; libvirt fills `parameters` with an array of the count told, or leaves it null.
    let told =
        unsafe { sys::virDomainGetJobStats(domain.as_ptr(), &mut kind, &mut parameters, &mut count, flags) };
    done(told)?;
    // SAFETY: the array has that many elements, and is ours until it is freed here, once.
    unsafe {
        sys::virTypedParamsGetInt(parameters, count, JOB_OPERATION.as_ptr(), &mut operation);
        sys::virTypedParamsFree(parameters, count);
    }
    Ok((kind, operation))
}

/// What became of a domain's last backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LastBackup {
    Completed,
    Failed,
    /// libvirt tells it once, not after a start of its own, and not when the domain was at something else since.
    Unknown,
}

/// What libvirt tells of the domain's last backup.
pub(crate) fn last_backup(domain: &Domain) -> Result<LastBackup, Error> {
    let (kind, operation) = job(domain, sys::VIR_DOMAIN_JOB_STATS_COMPLETED)?;
    Ok(became(kind, operation))
}

fn became(kind: c_int, operation: c_int) -> LastBackup {
    let is = |number: c_int, wanted: u32| u32::try_from(number) == Ok(wanted);
    if !is(operation, sys::VIR_DOMAIN_JOB_OPERATION_BACKUP) || is(kind, sys::VIR_DOMAIN_JOB_NONE) {
        LastBackup::Unknown
    } else if is(kind, sys::VIR_DOMAIN_JOB_COMPLETED) {
        LastBackup::Completed
    } else {
        LastBackup::Failed
    }
}

/// Whether the domain, which is up, is held by a backup that libvirt knows nothing of any more: it was ended as it began that, keeps
/// what it noted of it over each start of its own, and ends it never.
pub(crate) fn has_lost_backup(domain: &Domain) -> bool {
    // "backup job data missing": of one that it knows of it tells how far that is.
    job(domain, 0).is_err_and(|error| has_code(&error, ErrorNumber::InternalError))
}

/// Ends the job that the domain is at.
pub(crate) fn abort_job(domain: &Domain) -> Result<(), Error> {
    // SAFETY: the domain outlives the call.
    done(unsafe { sys::virDomainAbortJob(domain.as_ptr()) })
}

/// What libvirt's functions tell that return a number.
fn done(result: c_int) -> Result<(), Error> {
    if result < 0 { Err(Error::last_error()) } else { Ok(()) }
}

/// What the guest agent says about the guest's interfaces with a hardware address that is `ours`, at most
/// `max` addresses of all together for each of them. The guest may say anything.
pub(crate) fn agent_addresses(
    domain: &Domain,
    ours: impl Fn(&str) -> bool,
    max: usize,
) -> Result<Vec<GuestInterface>, Error> {
    answer_within(domain, AGENT_TIMEOUT);
    let mut interfaces: *mut sys::virDomainInterfacePtr = ptr::null_mut();
    let source = sys::VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT;
    // SAFETY: the domain outlives the call; libvirt fills `interfaces` with an array of the count returned.
    let count = unsafe { sys::virDomainInterfaceAddresses(domain.as_ptr(), &mut interfaces, source, 0) };
    let Ok(count) = usize::try_from(count) else { return Err(Error::last_error()) };
    let mut found: Vec<GuestInterface> = Vec::new();
    for index in 0..count {
        // SAFETY: `index` is below the count; each interface holds `naddrs` addresses and is ours until
        // freed here, once.
        unsafe {
            let interface = *interfaces.add(index);
            let mac = owned((*interface).hwaddr).filter(|mac| ours(mac));
            // Several may claim one hardware address.
            let told: usize = found.iter().filter(|one| one.mac == mac).map(|one| one.ips.len()).sum();
            if mac.is_some() && told < max {
                let count = usize::try_from((*interface).naddrs).unwrap_or(0).min(max - told);
                let ips = (0..count).filter_map(|n| owned((*(*interface).addrs.add(n)).addr)).collect();
                found.push(GuestInterface { mac, ips });
            }
            sys::virDomainInterfaceFree(interface);
        }
    }
    // SAFETY: as above.
    unsafe { free(interfaces.cast()) };
    Ok(found)
}

unsafe extern "C" {
    // libvirt's contract is that arrays it returns are freed with the C library's free().
    fn free(pointer: *mut c_void);
}

/// What a connection tells by itself. Called on the event loop's thread, so it must not block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Signal {
    /// The domain of that uuid changed.
    Domain(Uuid),
    /// The connection is gone.
    Closed,
}

type Sink = Box<dyn Fn(Signal) + Send + Sync>;

/// The callbacks registered on one connection. libvirt holds the connection open while they are
/// registered, so [`Callbacks::deregister`] must be called for it to end.
#[derive(Debug)]
pub(crate) struct Callbacks {
    lifecycle: Option<c_int>,
}

impl Callbacks {
    /// Registers `sink` for the end of the connection and, with `lifecycle`, for changes of any domain.
    pub(crate) fn register(
        connect: &Connect,
        lifecycle: bool,
        sink: impl Fn(Signal) + Clone + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let opaque = into_opaque(Box::new(sink.clone()));
        // SAFETY: `opaque` belongs to libvirt from here on, which gives it to `drop_sink` when it is done
        // with it; `closed` matches the callback's type.
        let status = unsafe {
            sys::virConnectRegisterCloseCallback(connect.as_ptr(), Some(closed), opaque, Some(drop_sink))
        };
        if status < 0 {
            let error = Error::last_error();
            // SAFETY: libvirt refused, so it never took the sink.
            unsafe { drop_sink(opaque) };
            return Err(error);
        }
        if !lifecycle {
            return Ok(Self { lifecycle: None });
        }
        let opaque = into_opaque(Box::new(sink));
        // SAFETY: libvirt calls every domain callback through the generic type and casts it back to the
        // type of the event id, which for lifecycle events is that of `changed`.
        let id = unsafe {
            let callback = std::mem::transmute::<LifecycleCallback, GenericCallback>(changed);
            sys::virConnectDomainEventRegisterAny(
                connect.as_ptr(),
                ptr::null_mut(),
                sys::VIR_DOMAIN_EVENT_ID_LIFECYCLE as c_int,
                Some(callback),
                opaque,
                Some(drop_sink),
            )
        };
        if id < 0 {
            let error = Error::last_error();
            // SAFETY: libvirt refused, so it never took the sink.
            unsafe { drop_sink(opaque) };
            Self { lifecycle: None }.deregister(connect);
            return Err(error);
        }
        Ok(Self { lifecycle: Some(id) })
    }

    /// Takes the callbacks away again. Errors do not matter: on a dead connection they are gone already.
    pub(crate) fn deregister(&self, connect: &Connect) {
        // SAFETY: the connection outlives the calls; both refuse what is not registered.
        unsafe {
            if let Some(id) = self.lifecycle {
                sys::virConnectDomainEventDeregisterAny(connect.as_ptr(), id);
            }
            sys::virConnectUnregisterCloseCallback(connect.as_ptr(), Some(closed));
        }
    }
}

/// By what a domain is known, whatever somebody calls it.
///
/// # Safety
/// The domain must be alive.
unsafe fn uuid_of(domain: sys::virDomainPtr) -> Option<Uuid> {
    let mut uuid = uuid::Bytes::default();
    // SAFETY: by contract; libvirt writes as many bytes as a uuid has.
    let status = unsafe { sys::virDomainGetUUID(domain, uuid.as_mut_ptr()) };
    (status == 0).then(|| Uuid::from_bytes(uuid))
}

type GenericCallback = unsafe extern "C" fn(sys::virConnectPtr, sys::virDomainPtr, *mut c_void);
type LifecycleCallback =
    unsafe extern "C" fn(sys::virConnectPtr, sys::virDomainPtr, c_int, c_int, *mut c_void) -> c_int;

fn into_opaque(sink: Sink) -> *mut c_void {
    // A box of a box: a pointer to a trait object is wider than C's pointer.
    Box::into_raw(Box::new(sink)).cast()
}

unsafe extern "C" fn drop_sink(opaque: *mut c_void) {
    // SAFETY: `opaque` came from `into_opaque`, and libvirt gives it back once.
    drop(unsafe { Box::from_raw(opaque.cast::<Sink>()) });
}

unsafe extern "C" fn closed(_: sys::virConnectPtr, _reason: c_int, opaque: *mut c_void) {
    // SAFETY: `opaque` came from `into_opaque` and lives until `drop_sink`.
    let sink = unsafe { &*opaque.cast::<Sink>() };
    sink(Signal::Closed);
}

unsafe extern "C" fn changed(
    _: sys::virConnectPtr,
    domain: sys::virDomainPtr,
    _event: c_int,
    _detail: c_int,
    opaque: *mut c_void,
) -> c_int {
    // SAFETY: libvirt keeps the domain alive during the callback; `opaque` as above.
    let (uuid, sink) = unsafe { (uuid_of(domain), &*opaque.cast::<Sink>()) };
    if let Some(uuid) = uuid {
        sink(Signal::Domain(uuid));
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backup_of_which_nothing_is_told_is_neither_whole_nor_failed() {
        let backup = sys::VIR_DOMAIN_JOB_OPERATION_BACKUP;
        for (kind, operation, became_of) in [
            (sys::VIR_DOMAIN_JOB_COMPLETED, backup, LastBackup::Completed),
            (sys::VIR_DOMAIN_JOB_FAILED, backup, LastBackup::Failed),
            (sys::VIR_DOMAIN_JOB_CANCELLED, backup, LastBackup::Failed),
            (sys::VIR_DOMAIN_JOB_NONE, 0, LastBackup::Unknown),
            (sys::VIR_DOMAIN_JOB_NONE, backup, LastBackup::Unknown),
            (sys::VIR_DOMAIN_JOB_COMPLETED, sys::VIR_DOMAIN_JOB_OPERATION_DUMP, LastBackup::Unknown),
            (sys::VIR_DOMAIN_JOB_FAILED, sys::VIR_DOMAIN_JOB_OPERATION_SNAPSHOT, LastBackup::Unknown),
        ] {
            let number = |number| c_int::try_from(number).unwrap();
            assert_eq!(became(number(kind), number(operation)), became_of, "{kind} {operation}");
        }
    }
}
