//! `eschedule explain`: what a state means, and who would take a query.

use ec_cloud::{Ask, Cloud, CloudError, Joining, Kind, Preview, View, preview as look};
use ec_model::{Attachment, Instance, InstanceId, ResourceQuery, State, Workload};
use ec_runtime::exit::{Failure, print, tell};
use serde::Serialize;

use crate::{
    cli::Output,
    config::Session,
    list,
    output::{is_dead, plain},
    run::{NO_ROOM, no_allocations, no_room_for},
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  eschedule explain unclaimed
      what a state means, or another word that a verb told
  eschedule explain web
      how it stands (`stands` of -o json), and who would take one more like it, in its group
  eschedule explain 'resources=VCPU:4,MEMORY_MB:8192&required=HW_CPU_X86_AVX2'
      the node that would be tried first, or what is short by how much where; nothing is claimed";

/// What is said of a state, or of another word in its place.
#[derive(Serialize)]
pub(crate) struct Explained {
    pub(crate) state: &'static str,
    pub(crate) text: &'static str,
}

/// What a word means, in any case of letters, where it is a state, or what verbs tell in the place of one; etcd is not asked.
pub(crate) fn word(word: &str) -> Option<Explained> {
    let word = word.to_ascii_uppercase();
    if let Some(state) = State::named(&word) {
        return Some(Explained { state: state.name(), text: meaning(state) });
    }
    let told = OF_VERBS.into_iter().find(|(is, _)| *is == word);
    told.map(|(state, text)| Explained { state, text })
}

/// Prints that.
pub(crate) fn explained(explained: &Explained, output: Output) -> Result<(), Failure> {
    let Explained { state, text } = explained;
    output.print(explained, || vec![(*state).to_owned()], || format!("{state}: {text}"))
}

/// How an instance stands.
#[derive(Serialize)]
pub(crate) struct Stands {
    pub(crate) instance: InstanceId,
    pub(crate) node_alive: bool,
    pub(crate) state: String,
    pub(crate) text: String,
    pub(crate) reason: Option<String>,
    pub(crate) doing: Option<String>,
}

/// What is said of an instance: beside how it stands, who would take one like it, where that can be asked.
#[derive(Serialize)]
struct OfInstance<T> {
    stands: Stands,
    #[serde(flatten)]
    one_more: Option<T>,
}

/// Says how an instance stands and what that means, and who would take one like it now: that nobody would is an answer, too.
pub(crate) async fn instance(session: &Session, called: &str, output: Output) -> Result<(), Failure> {
    let found = match ec_cloud::resolve(&session.cloud, called).await {
        Ok(instance) => ec_cloud::find(&session.cloud, instance).await?,
        Err(CloudError::NotFound(_)) => {
            let states = list::state(called).err().unwrap_or_default();
            return Err(Failure::failed(format!(
                "`{called}` is neither an instance nor a state nor a resources query: {states}, or for example `resources=VCPU:1,MEMORY_MB:256`"
            )));
        }
        Err(error) => return Err(error.into()),
    };
    let view = View::found(&found);
    if view.kind == Workload::Volume {
        return Err(Failure::failed(format!(
            "{called} is a volume: `eschedule volume show {called}` tells how it stands"
        )));
    }
    let stands = Stands {
        instance: view.instance,
        node_alive: view.node_alive,
        text: text(&view),
        state: view.state.clone(),
        reason: view.reason.clone(),
        doing: view.doing.clone(),
    };
    if output == Output::Table {
        let why: String = [&stands.reason, &stands.doing]
            .into_iter()
            .flatten()
            .map(|why| format!(" ({})", plain(why)))
            .collect();
        let is = if is_of_before(&view) { "was at last" } else { "is" };
        print(&format!("{called} {is} {}{why}: {}", stands.state, stands.text))?;
    }
    // That it is to end, or that nobody asks for it, is all that there is to say.
    let Some(record) = view.record else { return told(output, stands, None::<Preview>, Vec::new(), "") };
    // Groups are of its own project.
    let cloud = Cloud { project: record.project.clone(), ..session.cloud.clone() };
    let query =
        ResourceQuery::parse(&record.spec.query).map_err(|error| Failure::usage(error.to_string()))?;
    if output == Output::Table {
        let group = record.group.as_ref().map(|group| format!(", in its group {}", plain(group)));
        let root = Attachment::root_of(&record.volumes).map(|_| ", where the volume lies that it boots from");
        let where_to = format!("{}{}", group.unwrap_or_default(), root.unwrap_or_default());
        print(&format!("One more with its query, {}{where_to}:", plain(&record.spec.query)))?;
    }
    let looked = async {
        let ask = one_more(session, &cloud, &record, &query).await?;
        Ok::<_, CloudError>((look(&cloud, &ask).await?, ask))
    };
    match looked.await {
        Ok((Ok(preview), _)) => {
            let (name, text) = (preview.name.clone(), sentences(&preview));
            told(output, stands, Some(preview), vec![name], &text)
        }
        Ok((Err(no_room), ask)) => {
            let (made, text) = no_room_for(&cloud, &ask, &no_room, None).await;
            told(output, stands, Some(made), Vec::new(), NO_ROOM)?;
            tell(&format!("eschedule: no allocations left: {text}"));
            Ok(())
        }
        Err(error) if error.kind() == Kind::Unreachable => Err(error.into()),
        // As where what it was made of is gone.
        Err(error) => {
            told(output, stands, None::<Preview>, Vec::new(), "")?;
            tell(&format!("eschedule: there can be no other like it: {error}"));
            Ok(())
        }
    }
}

/// What is said of how one stands.
fn text(view: &View) -> String {
    let meaning = list::state(&view.state).map(meaning).unwrap_or("its keys cannot be read, or are gone");
    if is_of_before(view) {
        format!("its node is not alive, so that nobody knows how it is now. What that means: {meaning}")
    } else {
        meaning.to_owned()
    }
}

/// Whether its state is what an agent told that tells nothing any more. Who waits for an agent that is away is told so by the state's own text.
fn is_of_before(view: &View) -> bool {
    let is_of_wish = matches!(list::state(&view.state), Ok(State::Scheduled | State::Destroying) | Err(_));
    is_dead(view) && !is_of_wish
}

/// For people the last of it; for scripts all.
fn told<T: Serialize>(
    output: Output,
    stands: Stands,
    one_more: Option<T>,
    names: Vec<String>,
    text: &str,
) -> Result<(), Failure> {
    output.print(&OfInstance { stands, one_more }, || names, || text.to_owned())
}

/// One more as this one was asked for: within its group, and where the disk is that it boots from.
async fn one_more<'a>(
    session: &Session,
    cloud: &Cloud,
    record: &Instance,
    query: &'a ResourceQuery,
) -> Result<Ask<'a>, CloudError> {
    let mut ask = Ask::new(query)?.of(&record.spec.image);
    if let Some(order) = session.settings.strategy {
        ask = ask.by(order.into(), record.name.as_deref());
    }
    if let Some(group) = &record.group {
        ask = ask.within(Joining::new(cloud, group).await?);
    }
    match record.node().filter(|_| Attachment::root_of(&record.volumes).is_some()) {
        // A query that names the tree itself has it there already.
        Some(node) => Ok(ask.clone().on(node).unwrap_or(ask)),
        None => ask.beside(cloud, &record.spec.image).await,
    }
}

/// Says who would take a query now.
pub(crate) async fn query(session: &Session, text: &str, output: Output) -> Result<(), Failure> {
    let query = ResourceQuery::parse(text).map_err(|error| Failure::usage(error.to_string()))?;
    let mut ask = Ask::new(&query)?;
    if let Some(order) = session.settings.strategy {
        ask = ask.by(order.into(), None);
    }
    preview(session, &ask, output).await
}

/// Says where what is asked for would go now, or why nowhere. Nothing is changed.
pub(crate) async fn preview(session: &Session, ask: &Ask<'_>, output: Output) -> Result<(), Failure> {
    match look(&session.cloud, ask).await? {
        Ok(preview) => output.print(&preview, || vec![preview.name.clone()], || sentences(&preview)),
        Err(no_room) => Err(no_allocations(session, ask, &no_room, output).await?),
    }
}

fn sentences(preview: &Preview) -> String {
    let Preview { node, name, resources, others, not_alive } = preview;
    let shares: Vec<String> = resources
        .iter()
        .map(|(class, share)| {
            format!("{class} {} of {} free ({} in all)", share.wanted, share.free, share.capacity)
        })
        .collect();
    let mut text = format!("WOULD GO TO {node} ({})\nIt would take {}.", plain(name), shares.join(", "));
    text.push_str("\nOf those that have room and whose agents are alive it comes first");
    text.push_str(&match others {
        0 => "; there is no other.".to_owned(),
        1 => "; one more would be tried after it.".to_owned(),
        more => format!("; {more} more would be tried after it."),
    });
    if !not_alive.is_empty() {
        text.push_str(&format!("\nPassed over, since their agents are not alive: {}.", not_alive.len()));
    }
    text
}

/// What verbs tell of what is under way, or done, where no state says it: `list` shows none of these.
const OF_VERBS: [(&str, &str); 9] = [
    ("PAUSING", "a verb's word: its node was asked to halt the guest's processors, and next is PAUSED."),
    (
        "UNPAUSING",
        "a verb's word: its node was asked to let the guest's processors go on, and next is ACTIVE.",
    ),
    (
        "RESUMING",
        "a verb's word: its node was asked to let the guest go on where it was suspended, and next is ACTIVE.",
    ),
    (
        "CONFIRMED",
        "a verb's word: it keeps the size that it was given last, and what it had before is claimed no more; \
         `eschedule show` tells its state.",
    ),
    (
        "LOCKED",
        "a verb's word: nothing is done to it any more until `eschedule unlock`, and its state is as it was.",
    ),
    ("UNLOCKED", "a verb's word: things are done to it again, and its state is as it was."),
    ("RENAMED", "a verb's word: it is called otherwise, and its state is as it was."),
    (
        "SET",
        "a verb's word: its labels, its metadata and what follows its end are as was asked, once its node acts by \
         them, and its state is as it was.",
    ),
    (
        "DESTROYED",
        "a verb's word: it is gone, with its disk and its room; `eschedule events` tells of it for a day, by its uuid.",
    ),
];

/// What a state means, what comes next, and what to do.
fn meaning(state: State) -> &'static str {
    match state {
        State::Scheduled => {
            "room is claimed, and the request waits for its node's agent. Next is PREPARING, within a second where the \
             agent is alive. If it stays: `eschedule nodes` shows whether the node lives; a request without a node is a \
             command that is at work, or was killed, and goes away after ten minutes."
        }
        State::Preparing => {
            "the node's agent fetches the image, where it does not have it, and makes the disk. Next is STARTING. \
             `eschedule show` tells how far the image is (`progress`) and what the agent waits for (`doing`); a server \
             that fails is tried again for a minute. What fails here comes to ERROR, without claim and disk."
        }
        State::Starting => {
            "the guest is defined, is being started, or runs and has no address yet. Next is ACTIVE, when its address is \
             seen. If it stays with a reason, no address was seen in time: look whether the guest asks for one by DHCP, \
             at its console, or whether it boots at all, and in `eschedule nodes` whether its \
             node's network has an address left."
        }
        State::Active => {
            "the guest runs and has its address, which `eschedule INSTANCE` prints. It stays so until a user asks for \
             something else, the guest ends by itself, or its host does."
        }
        State::Paused => {
            "the guest is there and its processors are halted; it keeps memory, disk and room. By a user's wish: \
             `eschedule unpause`. By an I/O error of its host's disk, which is the reason then, it is let go on by its \
             node, again and again, while there is room: make some, or mend that disk."
        }
        State::Stopped => {
            "the guest does not run; it keeps its disk and its room. By a user's wish, or for the reason that is told: it \
             powered itself off, crashed, or was ended on its host. `eschedule start` starts it; `eschedule set --restart` \
             says what follows a crash by itself; only `eschedule destroy` gives its room back."
        }
        State::Stopping => {
            "a user wants it stopped: the guest was asked to end, by its power button, and is ended when its grace is over \
             (60 s, or what `--grace` said). Next is STOPPED. `eschedule stop --grace 0` ends it at once."
        }
        State::Rebooting => {
            "a user wants it started anew: the guest is asked to end, or being ended, and is started again. Next are \
             STARTING and ACTIVE. `eschedule reboot --hard` does not wait for the guest."
        }
        State::Suspending => {
            "a user wants it suspended: its memory is being written to its node's disk, which takes as long as the disk \
             does. Next is SUSPENDED."
        }
        State::Suspended => {
            "the guest does not run; its memory lies on its node's disk, and it keeps its disk and its room. \
             `eschedule resume` lets it go on where it was; `eschedule reboot --hard` deletes that memory and boots it anew."
        }
        State::Rebuilding => {
            "a user wants a new disk for it: the image is fetched, and the guest runs on with the disk that it has. Then it is \
             ended, and what it wrote is lost. Next are STARTING and ACTIVE, or STOPPED where it is not wanted running; an \
             image that cannot be had changes nothing, and `eschedule show` tells why (`rebuilt`)."
        }
        State::Rescuing => {
            "a user wants it booted from a rescue disk: the image is fetched, and the guest runs on from its own disk. Then it \
             is asked to end, and ended after 60 s. Next are STARTING and RESCUED; an image that cannot be had changes \
             nothing, and `eschedule show` tells why (`rescued`). `eschedule unrescue` takes the wish back."
        }
        State::Rescued => {
            "the guest runs from a rescue disk (/dev/vda in most systems), and its own disk is the second one (/dev/vdb), so \
             that it can be mended. `eschedule unrescue` deletes the rescue disk and boots it from its own again. What \
             changes its power, disk or size is refused meanwhile; `eschedule destroy` is not."
        }
        State::Unrescuing => {
            "a user wants it booted from its own disk again: the guest is ended, where it runs from its rescue disk, and that \
             is deleted. Next are STARTING and ACTIVE, or STOPPED where it is not wanted running."
        }
        State::Resizing => {
            "a user wants another size for it: its guest was asked to end, and is ended after 60 s; then its domain is made with \
             that size. Next are STARTING and VERIFY_RESIZE, or STOPPED where it is not wanted running; where it cannot \
             have that size, it goes on with the old one, and `eschedule show` tells why (`resized`)."
        }
        State::VerifyResize => {
            "it has the size that a user wanted for it, and what it had before is claimed still. Look whether it is well, and \
             then keep it so (`eschedule resize --confirm`), or go back (`eschedule resize --revert`). Until then nothing \
             can be asked of its power."
        }
        State::Destroying => {
            "a user wants it gone: its guest, disk, room and keys are being taken away, and then it is in no list any \
             more. Its name is free already. If it stays, `eschedule show` says what stands in the way; where its node is \
             not alive, it is done when that is back."
        }
        State::Error => {
            "it failed; the reason says at what. What never ran was cleaned up, has neither claim nor disk, and is shown for a \
             day, with its name, which `eschedule destroy` frees: mend the cause and ask again. What ran keeps its disk \
             and its room: its state is told anew when the cause is gone, `eschedule start` or `reboot` tries again, \
             `eschedule destroy` ends it."
        }
        State::Unclaimed => {
            "a guest of ours that etcd does not know of, because etcd was emptied or restored to a time before it. It runs \
             on, and its room is counted. `eschedule heal` brings it back; `eschedule destroy` ends it, with what it wrote."
        }
        State::Unknown => {
            "what is recorded of it cannot be read: it is damaged, of a newer release, or was deleted by hand; the reason \
             says which. Nobody touches it. Use the release that wrote it, mend the key with etcdctl, or, where no key is \
             left, `eschedule destroy` by its uuid."
        }
    }
}

#[cfg(test)]
mod tests {
    use ec_cloud::{Change, Verb};
    use ec_model::Extent;

    use super::*;
    use crate::acting::under_way;

    #[test]
    fn every_state_is_explained_with_what_comes_next_or_helps() {
        for state in State::ALL {
            let text = meaning(state);
            assert!(text.len() > 100 && text.ends_with('.') && !text.contains("  "), "{state}: {text}");
            let helps = ["`eschedule", "Next is", "Next are"].iter().any(|word| text.contains(word));
            assert!(helps, "{state}: {text}");
        }
    }

    #[test]
    fn of_one_whose_node_is_not_alive_it_is_said_that_nobody_knows_how_it_is() {
        let alive = View { state: "ACTIVE".to_owned(), node_alive: true, ..crate::fields::view(true) };
        assert_eq!(text(&alive), meaning(State::Active));
        let dead = View { node_alive: false, ..alive };
        assert!(text(&dead).starts_with("its node is not alive, so that nobody knows how it is now."));
        // That is wished, whatever is told.
        let doomed = View { state: "DESTROYING".to_owned(), ..dead };
        assert_eq!(text(&doomed), meaning(State::Destroying));
    }

    #[test]
    fn every_word_that_a_verb_tells_in_the_place_of_a_state_is_explained_and_stands_in_the_page() {
        let extent = Extent { query: String::new(), resources: Default::default() };
        let verbs = [
            Verb::Start,
            Verb::Stop(0),
            Verb::Reboot(0),
            Verb::Pause,
            Verb::Unpause,
            Verb::Suspend,
            Verb::Resume,
            Verb::Rebuild(None),
            Verb::Rescue(None),
            Verb::Unrescue,
            Verb::Resize(extent),
            Verb::Confirm,
            Verb::Revert,
            Verb::Lock(String::new()),
            Verb::Unlock,
            Verb::Rename(String::new()),
            Verb::Set(Change::default()),
        ];
        for told in verbs.iter().map(under_way).chain(["DESTROYING", "DESTROYED"]) {
            let explained = word(&told.to_lowercase()).unwrap_or_else(|| panic!("{told}"));
            assert_eq!(explained.state, told);
        }
        let page = include_str!("../../docs/cli.md");
        for (told, text) in OF_VERBS {
            assert!(text.ends_with('.') && page.contains(&format!("`{told}`")), "{told}");
        }
        assert!(word("broken").is_none());
    }
}
