//! One command to several: it is found out whom each word means; then each is asked, one after the other; then all that was asked
//! for is waited for, at the same time. Each is answered for by itself.

use std::{collections::HashSet, time::Duration};

use ec_model::InstanceId;
use ec_runtime::exit::{Failure, INTERRUPTED, UNREACHABLE, print};
use futures::{StreamExt, stream::FuturesOrdered};
use serde::Serialize;
use tokio::{sync::Semaphore, time::Instant};

use crate::{
    acting::Patience,
    cli::Output,
    output,
    shown::{Progress, Shown},
};

/// So many are waited for at the same time: each is two watches.
const AT_ONCE: usize = 64;

/// Who takes so long to say that nobody answers would have each of the others wait for that as long: after so many in a row none is
/// asked any more.
const AWAY: Duration = Duration::from_secs(4);
const IN_VAIN: usize = 2;

/// What came of one.
pub(crate) struct One<T> {
    /// For scripts.
    pub(crate) fields: T,
    /// For people.
    pub(crate) line: String,
    /// What it is called, where names are wanted.
    pub(crate) name: String,
}

/// What was asked of one.
pub(crate) enum Asked<T, W> {
    /// There is nothing to wait for.
    Done(One<T>),
    /// This is to be waited for, which is under way in these words.
    Awaited(W, String),
}

/// One that failed, of which people were told.
struct Failed<T> {
    fields: T,
    code: u8,
}

/// What scripts are told of one that failed: the word by which it was asked for, which that is, and why.
type OfFailed<'a, T> = &'a dyn Fn(&str, Option<InstanceId>, &str) -> T;

/// What came of all, as it is told.
pub(crate) struct Told<'a, T> {
    output: Output,
    /// One was named, which is no list.
    is_one: bool,
    of_failed: OfFailed<'a, T>,
    ended: Option<Failure>,
    /// Nobody reads what is told, or it cannot be written; all are asked nevertheless.
    unread: Option<Failure>,
    done: Vec<T>,
}

impl<'a, T: Serialize> Told<'a, T> {
    pub(crate) fn new(output: Output, is_one: bool, of_failed: OfFailed<'a, T>) -> Self {
        Self { output, is_one, of_failed, ended: None, unread: None, done: Vec::new() }
    }

    pub(crate) fn tell(&mut self, one: One<T>) {
        let told = match self.output {
            Output::Table => print(&one.line),
            Output::Name => print(&output::plain(&one.name)),
            Output::Json | Output::Yaml => Ok(()),
        };
        if let Err(failure) = told {
            self.unread.get_or_insert(failure);
        }
        self.done.push(one.fields);
    }

    pub(crate) fn fail(&mut self, word: &str, failure: &Failure) {
        self.keep(failed(self.of_failed, word, None, failure));
    }

    fn keep(&mut self, failed: Failed<T>) {
        end_as(&mut self.ended, failed.code);
        self.done.push(failed.fields);
    }

    pub(crate) fn end(self) -> Result<(), Failure> {
        match self.done.as_slice() {
            [one] if self.is_one => self.output.print_fields(one)?,
            all => self.output.print_fields(all)?,
        }
        self.ended.or(self.unread).map_or(Ok(()), Err)
    }
}

/// Tells people of one that failed, at once, whatever is still waited for.
fn failed<T>(of: OfFailed<'_, T>, word: &str, instance: Option<InstanceId>, failure: &Failure) -> Failed<T> {
    failure.tell("eschedule");
    Failed { fields: of(word, instance, &failure.message), code: failure.code }
}

/// Tells of a failure, and has the command end with it as [`end_as`] says.
pub(crate) fn note(ended: &mut Option<Failure>, failure: &Failure) {
    failure.tell("eschedule");
    end_as(ended, failure.code);
}

/// How a command ends of which something failed: as the first of that, unless somebody interrupted it.
fn end_as(ended: &mut Option<Failure>, code: u8) {
    if ended.is_none() || code == INTERRUPTED {
        *ended = Some(Failure { code, message: String::new() });
    }
}

/// What comes of a question about what a word means, unless somebody does not want to know any more, or so many before it were not
/// answered: `in_vain`, which is counted on.
async fn answer<T>(
    word: &str,
    patience: &Patience,
    in_vain: &mut usize,
    question: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    if patience.stop.is_cancelled() {
        let message = format!("interrupted: nothing was asked of {word}");
        return Err(Failure { code: INTERRUPTED, message });
    }
    if *in_vain == IN_VAIN {
        let message = format!("nothing was asked of {word}: nobody answered for those before");
        return Err(Failure { code: UNREACHABLE, message });
    }
    let since = Instant::now();
    let answer = question.await;
    match &answer {
        Ok(_) => *in_vain = 0,
        Err(failure) if failure.code == UNREACHABLE && since.elapsed() >= AWAY => *in_vain += 1,
        Err(_) => {}
    }
    answer
}

/// Asks each that a word means, and then waits for all for which there is something to wait for. One that fails does not keep the
/// others from being done, nor does one that takes long; but where nobody answers for several in a row, no other is asked.
pub(crate) async fn each<T: Serialize, W>(
    mut told: Told<'_, T>,
    words: &[String],
    patience: &Patience,
    meant: impl AsyncFn(&str) -> Result<InstanceId, Failure>,
    ask: impl AsyncFn(InstanceId, &str) -> Result<Asked<T, W>, Failure>,
    wait: impl AsyncFn(InstanceId, W, &Shown) -> Result<One<T>, Failure>,
) -> Result<(), Failure> {
    // Before any is asked: once one is gone its name would mean nobody, or be the beginning of another's uuid.
    let (mut said, mut named) = (HashSet::new(), HashSet::new());
    let mut each = Vec::new();
    let mut in_vain = 0;
    for word in words.iter().filter(|word| said.insert(*word)) {
        match answer(word, patience, &mut in_vain, Box::pin(meant(word))).await {
            // Named twice it is asked once, whichever way.
            Ok(instance) if !named.insert(instance) => {}
            Ok(instance) => each.push(Ok((word, instance))),
            Err(failure) => each.push(Err(failed(told.of_failed, word, None, &failure))),
        }
    }
    let mut later = Vec::new();
    // Who answered for one may answer for it again.
    in_vain = 0;
    for one in each {
        let outcome = match one {
            Ok((word, instance)) => {
                match answer(word, patience, &mut in_vain, Box::pin(ask(instance, word))).await {
                    Ok(asked) => Ok((word, instance, asked)),
                    Err(failure) => Err(failed(told.of_failed, word, Some(instance), &failure)),
                }
            }
            Err(failed) => Err(failed),
        };
        // What is known is told at once, where nothing is to be told before.
        match outcome {
            Ok((_, _, Asked::Done(one))) if later.is_empty() => told.tell(one),
            Err(failed) if later.is_empty() => told.keep(failed),
            outcome => later.push(outcome),
        }
    }
    let (all, of_failed) = (Progress::of(later.len()), told.of_failed);
    let places = Semaphore::new(AT_ONCE);
    let outcomes = later.into_iter().map(async |outcome| {
        let (word, instance, asked) = outcome?;
        let (awaited, first) = match asked {
            Asked::Done(one) => return Ok(one),
            Asked::Awaited(awaited, first) => (awaited, first),
        };
        // Nobody closes it. It is given back before the outcome is told, which waits for those before it.
        let _place = places.acquire().await;
        let shown = all.shown(word, &first);
        let came = wait(instance, awaited, &shown).await;
        shown.finish();
        came.map_err(|failure| all.suspend(|| failed(of_failed, word, Some(instance), &failure)))
    });
    let mut outcomes: FuturesOrdered<_> = outcomes.collect();
    while let Some(outcome) = outcomes.next().await {
        all.suspend(|| match outcome {
            Ok(one) => told.tell(one),
            Err(failed) => told.keep(failed),
        });
    }
    told.end()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use ec_runtime::exit::FAILED;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::cli::Waiting;

    /// Asks each of these, of whom who is not there is found so after that many seconds; tells who was asked and how all ended.
    async fn asked_of(words: &[(&str, u8, u64)]) -> (Vec<String>, Option<u8>) {
        let of_failed = |word: &str, _: Option<InstanceId>, _: &str| word.to_owned();
        let told = Told::new(Output::Name, false, &of_failed);
        let patience = Patience::until(Waiting { wait: false, timeout: 1 }, CancellationToken::new());
        let names: Vec<String> = words.iter().map(|(word, ..)| (*word).to_owned()).collect();
        let asked = RefCell::new(Vec::new());
        let meant = async |word: &str| {
            let number = words.iter().position(|(is, ..)| *is == word).unwrap();
            Ok(InstanceId::new(uuid::Uuid::from_u128(number as u128 + 1)))
        };
        let ask = async |_: InstanceId, word: &str| {
            asked.borrow_mut().push(word.to_owned());
            let (_, code, seconds) = words.iter().find(|(is, ..)| *is == word).unwrap();
            tokio::time::sleep(Duration::from_secs(*seconds)).await;
            let one = || One { fields: word.to_owned(), line: String::new(), name: String::new() };
            match code {
                0 => Ok(Asked::Done(one())),
                code => Err(Failure { code: *code, message: "away".to_owned() }),
            }
        };
        let wait = async |_: InstanceId, (): (), _: &Shown| unreachable!("nothing is waited for");
        let ended = each(told, &names, &patience, meant, ask, wait).await;
        (asked.into_inner(), ended.err().map(|failure| failure.code))
    }

    #[tokio::test(start_paused = true)]
    async fn where_two_in_a_row_are_not_answered_no_other_is_asked() {
        let (asked, ended) = asked_of(&[("a", UNREACHABLE, 5), ("b", UNREACHABLE, 5), ("c", 0, 0)]).await;
        assert_eq!((asked, ended), (vec!["a".to_owned(), "b".to_owned()], Some(UNREACHABLE)));
        // One that answers between them, who fails at once, or otherwise, keeps nobody from being asked.
        for between in [
            [("a", UNREACHABLE, 5), ("b", 0, 0), ("c", UNREACHABLE, 5), ("d", 0, 0)],
            [("a", UNREACHABLE, 5), ("b", UNREACHABLE, 1), ("c", 0, 0), ("d", 0, 0)],
            [("a", UNREACHABLE, 5), ("b", FAILED, 5), ("c", 0, 0), ("d", 0, 0)],
        ] {
            assert_eq!(asked_of(&between).await.0.len(), 4, "{between:?}");
        }
    }

    /// Asks each of these, of which what they mean is found out so; tells who was asked, and how all ended.
    async fn asked_of_meant(
        words: &[&str],
        meant: impl AsyncFn(&str) -> Result<InstanceId, Failure>,
        asked: &RefCell<Vec<String>>,
    ) -> Option<u8> {
        let of_failed = |word: &str, _: Option<InstanceId>, _: &str| word.to_owned();
        let told = Told::new(Output::Name, false, &of_failed);
        let patience = Patience::until(Waiting { wait: false, timeout: 1 }, CancellationToken::new());
        let ask = async |_: InstanceId, word: &str| {
            asked.borrow_mut().push(word.to_owned());
            Ok(Asked::Done(One { fields: word.to_owned(), line: String::new(), name: String::new() }))
        };
        let wait = async |_: InstanceId, (): (), _: &Shown| unreachable!("nothing is waited for");
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        each(told, &words, &patience, meant, ask, wait).await.err().map(|failure| failure.code)
    }

    #[tokio::test]
    async fn one_that_is_named_in_two_ways_is_asked_once_though_its_name_means_nobody_by_then() {
        let asked = RefCell::new(Vec::new());
        let meant = async |word: &str| match asked.borrow().is_empty() {
            true => Ok(InstanceId::new(uuid::Uuid::from_u128(u128::from(word == "other")))),
            false => Err(Failure::failed("it is gone")),
        };
        let ended = asked_of_meant(&["uuid", "web", "WEB", "other"], meant, &asked).await;
        assert_eq!((ended, asked.into_inner()), (None, vec!["uuid".to_owned(), "other".to_owned()]));
    }

    #[tokio::test(start_paused = true)]
    async fn where_nobody_says_what_two_in_a_row_mean_no_other_is_looked_for_and_who_was_found_is_asked() {
        let (asked, looked) = (RefCell::new(Vec::new()), RefCell::new(0));
        let meant = async |word: &str| {
            *looked.borrow_mut() += 1;
            if word == "a" {
                return Ok(InstanceId::new(uuid::Uuid::from_u128(1)));
            }
            tokio::time::sleep(Duration::from_secs(5)).await;
            Err(Failure { code: UNREACHABLE, message: "away".to_owned() })
        };
        let ended = asked_of_meant(&["a", "b", "c", "d"], meant, &asked).await;
        let found = (ended, asked.into_inner(), looked.into_inner());
        assert_eq!(found, (Some(UNREACHABLE), vec!["a".to_owned()], 3));
    }
}
