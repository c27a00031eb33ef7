//! What there is to look at of simulated guests: consoles, which print what is typed, screens, and disks.

use std::time::Duration;

use bytes::Bytes;
use ec_model::InstanceId;
use tokio::{io::AsyncWriteExt, net::UnixStream, sync::mpsc, time::sleep};

use super::SimulatedHypervisor;
use crate::{Console, HypervisorError, HypervisorResult, Printed, RunState, Typed};

/// So soon what changed is seen.
const PERIOD: Duration = Duration::from_millis(50);
/// The beginning of RFC 6143.
const GREETING: &[u8] = b"RFB 003.008\n";
/// Pieces that wait for their reader.
const PIECES: usize = 64;

impl SimulatedHypervisor {
    fn runs(&self, instance: InstanceId) -> bool {
        self.inner().host.observe(self.node, instance).domain == Some(RunState::Running)
    }

    pub(super) fn begin_console(&self, instance: InstanceId) -> HypervisorResult<Console> {
        let failed = |detail: &str| HypervisorError::Failed {
            what: format!("open the console of {instance}"),
            detail: detail.to_owned(),
        };
        if !self.runs(instance) {
            return Err(failed("it does not run"));
        }
        if !self.inner().open_consoles.insert(instance) {
            return Err(failed("somebody else has it open"));
        }
        let (print, output) = mpsc::channel(PIECES);
        // As little as a guest's line holds.
        let (input, mut typed) = mpsc::channel::<Typed>(1);
        let own = self.clone();
        tokio::spawn(async move {
            while own.runs(instance) {
                // What was typed before its reader left is typed.
                let left = print.is_closed();
                while let Ok(Typed { bytes, handed }) = typed.try_recv() {
                    own.inner().host.type_on_console(instance, &String::from_utf8_lossy(&bytes));
                    // What nobody takes is lost.
                    print.try_send(Ok(bytes)).ok();
                    handed.send(()).ok();
                }
                if left {
                    break;
                }
                sleep(PERIOD).await;
            }
            own.inner().open_consoles.remove(&instance);
        });
        Ok(Console { output, input })
    }

    /// A screen that greets as VNC does, and says back what it is told.
    pub(super) fn begin_graphics(&self, instance: InstanceId) -> HypervisorResult<UnixStream> {
        let failed = |detail: String| HypervisorError::Failed {
            what: format!("open the screen of {instance}"),
            detail,
        };
        if !self.runs(instance) {
            return Err(failed("it does not run".to_owned()));
        }
        let (near, mut far) = UnixStream::pair().map_err(|error| failed(error.to_string()))?;
        tokio::spawn(async move {
            // Whoever looks may go at any time.
            far.write_all(GREETING).await.ok();
            let (mut read, mut write) = far.split();
            tokio::io::copy(&mut read, &mut write).await.ok();
        });
        Ok(near)
    }

    /// A disk in whose file nothing but its capacity is written.
    pub(super) fn begin_reading(&self, volume: InstanceId) -> HypervisorResult<mpsc::Receiver<Bytes>> {
        let failed = |detail: &str| HypervisorError::Failed {
            what: format!("read the disk of {volume}"),
            detail: detail.to_owned(),
        };
        let inner = self.inner();
        if inner.host.has_user(volume) {
            return Err(failed("a domain has it"));
        }
        let capacity = inner.host.disk_bytes(self.node, volume).ok_or_else(|| failed("there is none"))?;
        let content = capacity.to_string();
        let (print, output) = mpsc::channel(PIECES);
        // There is room for both.
        print.try_send(Bytes::copy_from_slice(&(content.len() as u64).to_be_bytes())).ok();
        print.try_send(content.into()).ok();
        Ok(output)
    }

    pub(super) fn begin_following(&self, instance: InstanceId, max_bytes: usize) -> Printed {
        let (print, output) = mpsc::channel(PIECES);
        let own = self.clone();
        tokio::spawn(async move {
            let text = own.inner().host.console_tail(own.node, instance, usize::MAX);
            let mut told = text.len() - own.inner().host.console_tail(own.node, instance, max_bytes).len();
            let (mut seen, mut caught_up) = (false, false);
            while !print.is_closed() {
                let here = own.inner().host.observe(own.node, instance).domain.is_some();
                if seen && !here {
                    return;
                }
                seen |= here;
                let text = own.inner().host.console_tail(own.node, instance, usize::MAX);
                // A text that was set anew is told from its beginning.
                let news = text.get(told..).unwrap_or(&text).to_owned();
                told = text.len();
                if !news.is_empty() && print.send(Ok(news.into())).await.is_err() {
                    return;
                }
                if !std::mem::replace(&mut caught_up, true) && print.send(Ok(Bytes::new())).await.is_err() {
                    return;
                }
                sleep(PERIOD).await;
            }
        });
        output
    }
}
