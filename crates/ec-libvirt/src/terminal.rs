//! A guest's serial console, open for reading and typing.
//!
//! Each has a connection and a thread of its own. The thread waits for no guest, and does both directions in turn: two calls
//! at a time on one connection may crash libvirt's client (see the lanes). What is typed it may have to wait for libvirtd to
//! take: under one that stands still it stays until that goes on or ends, and has its place among the consoles as long.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use bytes::{Buf, Bytes};
use ec_hypervisor::{Console, HypervisorError, HypervisorResult, Typed};
use ec_model::{InstanceId, NodeId};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, mpsc, oneshot},
};
use virt::{connect::Connect, stream::Stream, sys};

use crate::{
    calls::Scope,
    config::LibvirtConfig,
    domain::{self, Found},
    error::{CallError, unreachable},
    events,
    lane::Lanes,
};

/// What a stream answers that has nothing, or takes nothing, at the moment.
const NOT_NOW: isize = -2;
/// Where there was nothing to do in either direction, the next look is so much later: soon while somebody types or the
/// guest prints, and a little later when that was a while ago.
const PAUSE: Duration = Duration::from_millis(1);
const IDLE_PAUSE: Duration = Duration::from_millis(10);
/// How long a while that is.
const IDLE_AFTER: Duration = Duration::from_secs(2);
/// A guest that takes nothing for so long reads no more of what was typed by who has left.
const LEAVING: Duration = Duration::from_millis(500);
/// So long after a guest has ended libvirt has noticed that.
const NOTICED: Duration = Duration::from_secs(2);
/// So often it is asked meanwhile.
const ASKED: Duration = Duration::from_millis(100);
/// Bytes that are read at a time.
const PIECE: usize = 4096;
/// Pieces that wait for their reader.
const PIECES: usize = 64;
/// Pieces that wait for the guest: whoever types gives the next when that before is handed over.
const TYPED: usize = 1;

/// Opens the console of a guest that runs, where there is a place for one more.
pub(crate) async fn open(
    config: &Arc<LibvirtConfig>,
    look: &Arc<Lanes>,
    places: &Arc<Semaphore>,
    instance: InstanceId,
) -> HypervisorResult<Console> {
    let what = format!("open the console of {instance}");
    let place = Arc::clone(places).try_acquire_owned().map_err(|_| HypervisorError::NotNow {
        what: what.clone(),
        detail: "as many consoles as may be are open on this host".into(),
    })?;
    let (told, opened) = oneshot::channel();
    let (on_thread, doing) = (Arc::clone(config), what.clone());
    let (look, runtime) = (Arc::clone(look), Handle::current());
    let spawned = thread::Builder::new().name("libvirt-console".into()).spawn(move || {
        match begin(&on_thread, &doing, instance) {
            Ok((connect, stream, run)) => {
                let (print, output) = mpsc::channel(PIECES);
                let (input, typed) = mpsc::channel(TYPED);
                // Who does not wait any more has dropped the receiver, which ends it.
                drop(told.send(Ok(Console { output, input })));
                if let Some(detail) = pump(&connect, stream, &print, typed) {
                    // Not here: what is in trouble may answer nobody, and this is a place of few.
                    runtime.spawn(async move {
                        if !has_ended(&look, on_thread.node, instance, run).await {
                            // What was printed before it is taken first.
                            print.send(Err(unreachable(&on_thread.uri, detail))).await.ok();
                        }
                    });
                }
            }
            Err(error) => drop(told.send(Err(error))),
        }
        drop(place);
    });
    spawned.map_err(|error| unreachable(&config.uri, format!("no thread for the console: {error}")))?;
    match tokio::time::timeout(config.call_timeout, opened).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(_)) => Err(unreachable(&config.uri, "the console's thread ended without a result".into())),
        Err(_) => {
            let seconds = config.call_timeout.as_secs();
            Err(HypervisorError::TimedOut { what: format!("the call to {what}"), seconds })
        }
    }
}

/// Which start of a guest it is, as libvirt counts them.
type Run = Option<u32>;

fn begin(
    config: &LibvirtConfig,
    what: &str,
    instance: InstanceId,
) -> HypervisorResult<(Connect, Stream, Run)> {
    events::start_loop().map_err(|detail| unreachable(&config.uri, detail))?;
    let connect = Connect::open(Some(&config.uri))
        .map_err(|error| unreachable(&config.uri, error.message().to_owned()))?;
    let opened = || -> Result<(Stream, Run), CallError> {
        let domain = match domain::find(&connect, config.node, instance)? {
            Found::Ours(domain) if domain.is_active()? => domain,
            Found::Ours(_) => return Err(CallError::Refused("the guest does not run".into())),
            Found::Foreign => return Err(domain::foreign(config.node, instance)),
            Found::Nothing => return Err(CallError::Refused("there is no such domain".into())),
        };
        let stream = Stream::new(&connect, sys::VIR_STREAM_NONBLOCK)?;
        // Its first console. Whoever has it open already keeps it.
        domain.open_console(None, &stream, 0)?;
        Ok((stream, domain.id()))
    };
    match opened() {
        Ok((stream, run)) => Ok((connect, stream, run)),
        Err(error) => {
            let lost = !is_alive(&connect);
            Err(error.classify(what, &config.uri, config.call_timeout.as_secs(), lost))
        }
    }
}

/// Told without asking the daemon.
fn is_alive(connect: &Connect) -> bool {
    connect.is_alive().unwrap_or(false)
}

/// Whether that run of a guest is over: the stream says the same when it is, and when libvirt is in trouble, which is
/// given no longer than it takes to notice an end.
async fn has_ended(look: &Lanes, node: NodeId, instance: InstanceId, run: Run) -> bool {
    let over = async {
        loop {
            let what = format!("look whether {instance} runs");
            let seen = move |connect: &Connect| match domain::find(connect, node, instance)? {
                Found::Ours(domain) => Ok(domain.id() == run),
                Found::Foreign | Found::Nothing => Ok(false),
            };
            // The guest's end of the stream closes before libvirt has noticed that it ends.
            if let Ok(false) = look.call(what, Scope::Instance(instance), seen).await {
                return;
            }
            tokio::time::sleep(ASKED).await;
        }
    };
    tokio::time::timeout(NOTICED, over).await.is_ok()
}

/// Passes bytes on in both directions, until the stream ends, or its reader has left and the guest has what that one typed. How the
/// stream ended.
fn pump(
    connect: &Connect,
    stream: Stream,
    print: &mpsc::Sender<HypervisorResult<Bytes>>,
    mut typed: mpsc::Receiver<Typed>,
) -> Option<String> {
    let (mut read, mut rest) = (vec![0; PIECE], None::<Typed>);
    let (mut busy, mut taken) = (Instant::now(), Instant::now());
    let broke = loop {
        // Looked at first: by then all is there that was typed.
        let left = print.is_closed();
        let came = match stream.recv(&mut read) {
            Ok(NOT_NOW) => 0,
            Ok(count @ 1..) => usize::try_from(count).unwrap_or(0),
            Ok(_) => break Some("the console's stream ended".to_owned()),
            Err(error) => break Some(error.message().to_owned()),
        };
        if came > 0 {
            // What nobody takes in time is lost.
            print.try_send(Ok(Bytes::copy_from_slice(&read[..came]))).ok();
        }
        if rest.is_none() {
            rest = typed.try_recv().ok();
        }
        if left && (rest.is_none() || taken.elapsed() >= LEAVING) {
            break None;
        }
        let mut went = 0;
        if let Some(Typed { bytes, .. }) = &mut rest
            && !bytes.is_empty()
        {
            went = match stream.send(bytes) {
                Ok(NOT_NOW) => 0,
                Ok(count) => usize::try_from(count).unwrap_or(0),
                Err(error) => break Some(error.message().to_owned()),
            };
            bytes.advance(went);
        }
        if let Some(Typed { handed, .. }) = rest.take_if(|piece| piece.bytes.is_empty()) {
            // Who does not want to know has dropped the receiver.
            handed.send(()).ok();
        }
        if went > 0 || !left {
            taken = Instant::now();
        }
        if came == 0 && went == 0 {
            // A stream does not tell by itself that its daemon is gone.
            if !is_alive(connect) {
                break Some("the connection is gone".to_owned());
            }
            thread::sleep(if busy.elapsed() < IDLE_AFTER { PAUSE } else { IDLE_PAUSE });
        } else {
            busy = Instant::now();
        }
    };
    // Of one that has ended there is nothing to end.
    stream.abort().ok();
    broke
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn whether_a_guest_has_ended_is_not_waited_for_where_libvirt_answers_nobody() {
        // libvirt's own driver for tests.
        let lanes = |timeout| Lanes::new("test:///default", timeout, 1, 0, &Arc::default(), None);
        let look = Arc::new(lanes(Duration::from_secs(600)));
        let [node, instance] = [1u128, 2].map(uuid::Uuid::from_u128);
        let (node, instance) = (NodeId::new(node), InstanceId::new(instance));
        assert!(has_ended(&look, node, instance, Some(1)).await, "there is no such guest");

        let (release, gate) = std::sync::mpsc::channel::<()>();
        let (busy, is_busy) = oneshot::channel();
        let stuck = Arc::clone(&look);
        tokio::spawn(async move {
            let hangs = move |_: &Connect| {
                busy.send(()).ok();
                Ok(gate.recv().is_ok())
            };
            stuck.call("hang".to_owned(), Scope::Host, hangs).await
        });
        is_busy.await.unwrap();
        let begun = Instant::now();
        assert!(!has_ended(&look, node, instance, Some(1)).await);
        assert!(begun.elapsed() < 2 * NOTICED, "{:?}", begun.elapsed());
        drop(release);
    }
}
