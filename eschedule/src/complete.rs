//! Completions: commands and options, and what the cluster has by name, asked for while somebody types.

use std::{ffi::OsStr, future::Future, io, time::Duration};

use clap::{Arg, Command, CommandFactory};
use clap_complete::{
    ArgValueCompleter, CompleteEnv, CompletionCandidate, Shell,
    env::{EnvCompleter, Shells},
};
use ec_cloud::{CloudError, VolumeView};
use ec_model::{OF_INSTANCE, OF_VOLUME, State, Workload};
use ec_runtime::exit::{Failure, print};

use crate::{
    cli::{CONFIG_VARIABLE, Cli},
    config::{Session, Settings},
};

/// By this a shell's script says that it wants words. The shell is its value.
const VARIABLE: &str = "COMPLETE";

/// Nobody waits longer for a word.
const PATIENCE: Duration = Duration::from_secs(2);

/// What stands behind clap's script for bash. That takes words apart at `@`, `:` and `=`, which ours have in them: they are put together
/// as they stand in the line, up to the cursor, and of what is offered that is left out which stands there before the last part.
const BASH: &str = r#"
_eschedule() {
    local rest=${COMP_LINE:0:COMP_POINT} words=() last=-1 piece
    for piece in "${COMP_WORDS[@]}"; do
        [[ -n $rest ]] || break
        if [[ $last -lt 0 || $rest == [[:space:]]* || $piece != [@:=]* && ${words[last]} != *[@:=] ]]; then
            last=$((last + 1))
            rest=${rest#"${rest%%[![:space:]]*}"}
        fi
        piece=${piece:0:${#rest}}
        words[last]+=$piece
        rest=${rest:${#piece}}
    done
    # Without the quotes, as the second argument is, which is what will be replaced.
    local word=${words[last]//[\"\']/} at
    [[ $word == *"$2" ]] || word=$2
    local COMP_WORDS=("${words[@]}") COMP_CWORD=$last
    _clap_complete_eschedule "$1" "$word" "$3"
    for at in "${!COMPREPLY[@]}"; do
        COMPREPLY[at]=${COMPREPLY[at]:${#word}-${#2}}
    done
}
if [[ ${BASH_VERSINFO[0]} -gt 4 || ${BASH_VERSINFO[0]} -eq 4 && ${BASH_VERSINFO[1]} -ge 4 ]]; then
    complete -o nospace -o bashdefault -o nosort -F _eschedule eschedule
else
    complete -o nospace -o bashdefault -F _eschedule eschedule
fi
"#;

/// Answers a shell that asks for words, and ends; otherwise does nothing.
pub(crate) fn answer() {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// Prints what a shell runs to complete from now on.
pub(crate) fn script(shell: Shell) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::failed(format!("failed to write completions: {error}"));
    let shells = Shells::builtins();
    let name = shell.to_string();
    let completer: &dyn EnvCompleter =
        shells.completer(&name).ok_or_else(|| Failure::usage(format!("no completions for {name}")))?;
    let mut text = Vec::new();
    completer
        .write_registration(VARIABLE, "eschedule", "eschedule", "eschedule", &mut text)
        .map_err(failed)?;
    if shell == Shell::Bash {
        text.extend(BASH.bytes());
    }
    print(&String::from_utf8_lossy(&text))
}

/// The grammar, with who knows the words of each value.
fn command() -> Command {
    knowing(Cli::command())
}

fn knowing(command: Command) -> Command {
    let name = command.get_name().to_owned();
    command
        .mut_args(|arg| match value(&arg).and_then(|value| completer(&meant(&name, &arg, value))) {
            Some(completer) => arg.add(completer),
            None => arg,
        })
        .mut_subcommands(knowing)
}

/// What help calls the value of an argument.
fn value(arg: &Arg) -> Option<String> {
    arg.get_value_names()?.first().map(ToString::to_string)
}

/// What a command takes that calls it otherwise: `rebuild` takes an image behind its instance, and nobody is told which of the words is
/// typed; `forget` takes no node that is alive.
fn meant(command: &str, arg: &Arg, value: String) -> String {
    match (command, value.as_str()) {
        ("rebuild", _) if arg.get_id() == "words" => "INSTANCE|IMAGE".to_owned(),
        ("forget", "NODE") => "NODE that is gone".to_owned(),
        _ => value,
    }
}

fn completer(value: &str) -> Option<ArgValueCompleter> {
    Some(match value {
        "INSTANCE" | "QUERY|INSTANCE" => asking(instances),
        "INSTANCE|IMAGE" => asking(async |session, typed: String| {
            let images = images(&session, &typed).await?;
            Ok(images.into_iter().chain(instances(session, typed).await?).collect())
        }),
        "SNAPSHOT" => asking(async |session, beginning| {
            let volumes = ec_cloud::volumes(&session.cloud).await?;
            let is_meant = |volume: &VolumeView| volume.snapshot;
            Ok(volumes.into_iter().filter(is_meant).flat_map(|it| called(&session, it, &beginning)).collect())
        }),
        "STORAGE" => asking(async |session, _| {
            let storages = ec_cloud::storages(&session.cloud).await?;
            Ok(storages.into_iter().map(|storage| storage.storage).collect())
        }),
        "URL|FILE|DISK" => asking(async |session, typed: String| disks(&session, &typed).await),
        "VOLUME" => asking(async |session, beginning| {
            ec_cloud::called_beginning(&session.cloud, Workload::Volume, &beginning).await
        }),
        "NODE" => asking(async |session, _| {
            let nodes = ec_cloud::named_nodes(&session.cloud).await?;
            Ok(nodes.all().into_iter().map(str::to_owned).collect())
        }),
        "NODE that is gone" => asking(async |session, _| {
            let nodes = ec_cloud::named_nodes(&session.cloud).await?;
            Ok(nodes.gone().into_iter().map(str::to_owned).collect())
        }),
        "FLAVOR" => asking(async |session, _| {
            let flavors = ec_cloud::flavors(&session.cloud).await?;
            Ok(flavors.into_iter().map(|flavor| flavor.name).collect())
        }),
        "KEYPAIR|FILE" | "KEYPAIR" => asking(async |session, _| {
            let keypairs = ec_cloud::keypairs(&session.cloud).await?;
            Ok(keypairs.into_iter().map(|keypair| keypair.name).collect())
        }),
        "GROUP" => asking(async |session, _| {
            let groups = ec_cloud::groups(&session.cloud).await?;
            Ok(groups.into_iter().map(|group| group.group.name).collect())
        }),
        "IMAGE" | "IMAGE_URL" | "IMAGE|URL" | "DISK|IMAGE" => {
            asking(async |session, typed: String| images(&session, &typed).await)
        }
        "STATE" => ArgValueCompleter::new(states),
        "STATE|QUERY|INSTANCE" => ArgValueCompleter::new(|typed: &OsStr| {
            states(typed).into_iter().chain(asked(typed, instances)).collect::<Vec<_>>()
        }),
        _ => return None,
    })
}

/// Images, those of schedule.yaml too, and disks that can be copied.
async fn images(session: &Session, typed: &str) -> Result<Vec<String>, CloudError> {
    let images = ec_cloud::images(&session.cloud).await.unwrap_or_default();
    let names = images.into_iter().map(|image| image.name);
    let disks = disks(session, typed).await?;
    Ok(session.settings.images.keys().cloned().chain(names).chain(disks).collect())
}

/// What can be copied, once somebody typed of what kind it is.
async fn disks(session: &Session, typed: &str) -> Result<Vec<String>, CloudError> {
    for (prefix, kind) in [(OF_VOLUME, Workload::Volume), (OF_INSTANCE, Workload::Machine)] {
        if let Some(beginning) = typed.strip_prefix(prefix) {
            let called = ec_cloud::called_beginning(&session.cloud, kind, beginning).await?;
            return Ok(called.into_iter().map(|called| format!("{prefix}{called}")).collect());
        }
    }
    Ok(Vec::new())
}

/// What a volume can be called by: its name where it is of the project, and its uuid where somebody began with that.
fn called(session: &Session, view: VolumeView, typed: &str) -> Vec<String> {
    let is_ours = view.project.as_ref() == Some(&session.cloud.project);
    let uuid = view.volume.to_string();
    let is_typed = typed.len() >= 4 && uuid.starts_with(&typed.to_ascii_lowercase());
    view.name.filter(|_| is_ours).into_iter().chain(is_typed.then_some(uuid)).collect()
}

/// Instances that begin so; of `USER@INSTANCE`, which ssh takes, behind the user.
async fn instances(session: Session, typed: String) -> Result<Vec<String>, CloudError> {
    let (user, beginning) = typed.split_at(typed.rfind('@').map_or(0, |at| at + 1));
    let called = ec_cloud::called_beginning(&session.cloud, Workload::Machine, beginning).await?;
    Ok(called.into_iter().map(|called| format!("{user}{called}")).collect())
}

/// States that begin as somebody typed, in either case of letters; of several with commas between, the last.
fn states(typed: &OsStr) -> Vec<CompletionCandidate> {
    let Some(typed) = typed.to_str() else { return Vec::new() };
    let (before, beginning) = typed.rsplit_once(',').map_or(("", typed), |(before, last)| (before, last));
    let before = if before.is_empty() { String::new() } else { format!("{before},") };
    let states = State::ALL.into_iter().map(State::name);
    let fitting = states.filter(|state| state.starts_with(&beginning.to_ascii_uppercase()));
    fitting.map(|state| CompletionCandidate::new(format!("{before}{state}"))).collect()
}

/// Words that begin as somebody typed, of those that are answered; none where nobody answers in time.
fn asking<F>(ask: impl Fn(Session, String) -> F + Send + Sync + 'static) -> ArgValueCompleter
where
    F: Future<Output = Result<Vec<String>, CloudError>>,
{
    ArgValueCompleter::new(move |typed: &OsStr| asked(typed, &ask))
}

fn asked<F>(typed: &OsStr, ask: impl Fn(Session, String) -> F) -> Vec<CompletionCandidate>
where
    F: Future<Output = Result<Vec<String>, CloudError>>,
{
    let Some(beginning) = typed.to_str().map(str::to_owned) else { return Vec::new() };
    let asked = async {
        let config = std::env::var_os(CONFIG_VARIABLE).filter(|file| !file.is_empty());
        let settings = Settings::load(config.as_deref().map(std::path::Path::new)).ok()?;
        let mut session = Session::open(settings).await.ok()?;
        // Whoever types reads nothing between.
        session.cloud.notice = |_| {};
        ask(session, beginning.clone()).await.ok()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let words = runtime.ok().and_then(|runtime| {
        let words = runtime.block_on(async { tokio::time::timeout(PATIENCE, asked).await.ok().flatten() });
        // Who looks for a name's address does so in a thread that nothing ends before its answer.
        runtime.shutdown_background();
        words
    });
    let words = words.unwrap_or_default().into_iter();
    words.filter(|word| fits(word, &beginning)).map(CompletionCandidate::new).collect()
}

/// Whether a word begins as somebody typed, in any case of letters, as names are meant in any; and can be one.
fn fits(word: &str, beginning: &str) -> bool {
    word.to_ascii_lowercase().starts_with(&beginning.to_ascii_lowercase()) && is_word(word)
}

/// Whether it is one word of a command line, and nothing else. The shells' scripts quote nothing, and what others' records have as
/// a name may be anything.
fn is_word(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | ':' | '@' | '/' | '-');
    !text.starts_with('-') && text.chars().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_for_an_address_that_is_still_looked_for() {
        ec_runtime::install_tls_provider();
        let begun = std::time::Instant::now();
        let ask = |_, _| async {
            // As a name's address is looked for.
            tokio::task::spawn_blocking(|| std::thread::sleep(10 * PATIENCE)).await.ok();
            Ok(Vec::new())
        };
        assert!(asked(OsStr::new("web"), ask).is_empty());
        assert!(begun.elapsed() < 5 * PATIENCE);
    }

    #[test]
    fn words_are_offered_in_any_case_of_letters() {
        for (word, typed, fit) in [
            ("web", "WE", true),
            ("Host1", "host", true),
            ("root@web", "root@W", true),
            ("web", "", true),
            ("web", "eb", false),
            ("a b", "a", false),
        ] {
            assert_eq!(fits(word, typed), fit, "{word} {typed}");
        }
    }

    #[test]
    fn what_a_shell_would_run_or_take_apart_is_no_word() {
        for word in ["web-1", "host.example.org", "debian:12", "me@home", "a_b/c", "", "72ff1f6a-0"] {
            assert!(is_word(word), "{word}");
        }
        for text in
            ["$(id)", "`id`", "a b", "a;b", "a&b", "a\nb", "a'b", "*", "~root", "--yes", "wörd", "a\u{9b}b"]
        {
            assert!(!is_word(text), "{text}");
        }
    }
}
