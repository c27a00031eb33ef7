//! One life of an agent: the real engine, and what the runtime around it has under way. Every piece of work goes on
//! step by step, in any order, and the agent may be killed between any two.

use std::{collections::BTreeMap, time::Duration};

use ec_model::{InstanceId, Observed};
use ec_plan::{
    Limits,
    engine::{
        Begun, Command, Engine, Event, Found, Held, Now, Search, Seen, Setup, StatusEntry, Whose, Work,
    },
};

use crate::{
    outside::{GRACE, Outside, Wish, address},
    worker::Worker,
};

/// What a watch or the hypervisor tells.
#[derive(Debug, Clone)]
pub(crate) enum News {
    Changed(InstanceId, Option<(Wish, i64)>),
    Lost,
    Listing,
    Presence,
    Hint(InstanceId),
    HintAll,
}

/// Work of the runtime. Nothing of it is done at one moment: what was read is told later.
#[derive(Debug)]
pub(crate) enum Task {
    Look(Begun, Option<BTreeMap<InstanceId, StatusEntry>>, Option<BTreeMap<InstanceId, Observed>>),
    Read(Question),
    Told(Event),
    Job(Box<Worker>),
}

#[derive(Debug)]
pub(crate) enum Question {
    Observe(InstanceId, Begun),
    Placement(InstanceId),
    Whose(InstanceId),
    Audit(Begun),
}

#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) engine: Engine,
    pub(crate) tasks: Vec<Task>,
    search: Search,
    began: Duration,
    /// Everything that was said, to be said again to another engine.
    said: Vec<(Event, Now, Vec<Command>)>,
    /// The jobs that it has begun, and when. Asking placement is none: each audit may ask for what it misses.
    pub(crate) begun: Vec<(Duration, InstanceId, Work)>,
    now: Duration,
    /// Of which instances work is under way.
    working: Vec<InstanceId>,
    /// The requests were told once.
    listed: bool,
}

const SETUP: Setup = Setup { limits: Limits { address: Duration::from_secs(300), grace: GRACE }, nics: 1 };

impl Agent {
    pub(crate) fn new(outside: &mut Outside) -> Self {
        outside.news = vec![News::Listing];
        Self {
            engine: Engine::new(SETUP, Now { since_start: Duration::ZERO, stamp: outside.stamp() }),
            tasks: Vec::new(),
            search: Search::default(),
            began: outside.now,
            said: Vec::new(),
            begun: Vec::new(),
            now: Duration::ZERO,
            working: Vec::new(),
            listed: false,
        }
    }

    /// The same events are followed by the same commands.
    pub(crate) fn replay(&self) {
        let Some((_, first, _)) = self.said.first() else { return };
        let mut engine = Engine::new(SETUP, Now { since_start: Duration::ZERO, ..*first });
        for (event, now, commands) in &self.said {
            assert_eq!(engine.on(event.clone(), *now), *commands, "{event:?}");
        }
    }

    fn tell(&mut self, outside: &Outside, event: Event) {
        match &event {
            Event::Ended(report) => self.working.retain(|instance| *instance != report.instance),
            Event::Allocation(instance, _) | Event::Whose(instance, _) => {
                self.working.retain(|other| other != instance);
            }
            Event::Listed(_) => self.listed = true,
            _ => {}
        }
        self.now = outside.now;
        let now = Now { since_start: outside.now - self.began, stamp: outside.stamp() };
        let commands = self.engine.on(event.clone(), now);
        self.said.push((event, now, commands.clone()));
        for command in commands {
            self.take(command);
        }
    }

    fn take(&mut self, command: Command) {
        let task = match command {
            Command::LookAtAll(begun) => {
                let twice = self.tasks.iter().any(|task| matches!(task, Task::Look(..)));
                assert!(!twice, "one look at a time");
                Task::Look(begun, None, None)
            }
            Command::Observe(instance, begun) => Task::Read(Question::Observe(instance, begun)),
            Command::Audit(begun) => Task::Read(Question::Audit(begun)),
            Command::AskPlacement(instance) => {
                self.works(instance);
                Task::Read(Question::Placement(instance))
            }
            Command::AskWhose(instance) => {
                self.works(instance);
                Task::Read(Question::Whose(instance))
            }
            Command::Begin(job) => {
                assert!(self.listed, "nothing is begun before the requests are listed");
                self.works(job.instance);
                self.begun.push((self.now, job.instance, job.work.clone()));
                assert!(self.engine.why(job.instance).is_some_and(|why| !why.is_empty()), "{job:?}");
                let fails = matches!(job.work, Work::Fail(_));
                let unreadable = job.request.is_none() && job.request_revision.is_some();
                assert!(!unreadable || fails, "what cannot be read is not touched: {job:?}");
                Task::Job(Box::new(Worker::new(*job)))
            }
            Command::Cancel(instance) => {
                let job = self.tasks.iter_mut().find_map(|task| match task {
                    Task::Job(worker) if worker.job.instance == instance => Some(worker),
                    _ => None,
                });
                // Its report may be on the way.
                if let Some(job) = job {
                    job.cancelled = true;
                }
                return;
            }
            Command::TakeUp(instance, newer) => {
                for task in &mut self.tasks {
                    if let Task::Job(worker) = task
                        && worker.job.instance == instance
                    {
                        worker.job.request = newer.record.clone().ok();
                        worker.job.request_revision = Some(newer.revision);
                    }
                }
                return;
            }
            Command::Search(search) => {
                self.search = search;
                return;
            }
            // What a watch has not told here, it tells later.
            Command::Counted(_) | Command::Tell(_) | Command::Relist => return,
        };
        self.tasks.push(task);
    }

    fn works(&mut self, instance: InstanceId) {
        assert!(!self.working.contains(&instance), "one job at a time: {instance}");
        self.working.push(instance);
    }

    /// One step of something that is under way; `die` says of what. Whether there was anything.
    pub(crate) fn step(&mut self, outside: &mut Outside, die: usize) -> bool {
        let news = usize::from(!outside.news.is_empty());
        let choices = news + self.tasks.len();
        if choices == 0 {
            return false;
        }
        match (die % choices).checked_sub(news) {
            None => {
                let news = outside.news.remove(0);
                let event = match news.clone() {
                    News::Changed(instance, request) => {
                        let request = request.map(|request| outside.requested(instance, request));
                        Event::Changed(vec![(instance, request)])
                    }
                    News::Lost => Event::WatchLost("broken".to_owned()),
                    News::Listing => Event::Listed(outside.requests()),
                    News::Presence => Event::PresenceChanged,
                    News::Hint(instance) => Event::Hint(instance),
                    News::HintAll => Event::HintAll,
                };
                self.tell(outside, event);
                if let News::Changed(instance, request) = news {
                    self.goes_for(instance, request.map(|(wish, _)| wish));
                }
            }
            Some(task) => match self.tasks.remove(task) {
                Task::Told(event) => self.tell(outside, event),
                task => {
                    let rest = go_on(task, outside);
                    self.tasks.insert(self.tasks.len().min(die % (self.tasks.len() + 1)), rest);
                }
            },
        }
        true
    }

    /// The newest wish wins: what goes on is for it, or was asked to stop.
    fn goes_for(&self, instance: InstanceId, newest: Option<Wish>) {
        for task in &self.tasks {
            if let Task::Job(worker) = task
                && worker.job.instance == instance
            {
                assert!(worker.cancelled || worker.wish() == newest, "{newest:?} is the newest: {worker:?}");
            }
        }
    }

    /// The clock goes on to the next due time, if that is not after `limit`.
    pub(crate) fn due(&mut self, outside: &mut Outside, limit: Duration) -> bool {
        let Some(due) = self.engine.next_due().map(|due| due + self.began).filter(|due| *due <= limit) else {
            return false;
        };
        outside.now = outside.now.max(due);
        self.tell(outside, Event::Due);
        assert!(
            self.engine.next_due().is_none_or(|next| next + self.began > outside.now),
            "what was due is due no more"
        );
        true
    }

    /// A search for addresses.
    pub(crate) fn search(&mut self, outside: &Outside, known: bool) {
        let mut looked_at = self.search.waiting.clone();
        if known {
            looked_at.extend(&self.search.known);
        }
        if looked_at.is_empty() || outside.blind {
            return;
        }
        let has = |instance: &InstanceId| outside.addresses && outside.things[instance].runs();
        let addresses =
            looked_at.into_iter().filter(has).map(|instance| (instance, vec![address(instance)])).collect();
        self.tell(outside, Event::Found(Found { waiting: self.search.waiting.clone(), addresses }));
    }
}

/// What is left of a task after one step.
fn go_on(task: Task, outside: &mut Outside) -> Task {
    let down = || "down".to_owned();
    match task {
        Task::Look(begun, None, _) if outside.etcd_up => Task::Look(begun, Some(outside.statuses()), None),
        Task::Look(begun, Some(statuses), None) if !outside.blind => {
            Task::Look(begun, Some(statuses), Some(outside.domains()))
        }
        Task::Look(begun, Some(statuses), Some(observed)) => {
            let seen: Seen = outside.seen(statuses, observed);
            Task::Told(Event::Looked(begun, Ok(seen)))
        }
        Task::Look(begun, ..) => Task::Told(Event::Looked(begun, Err(down()))),
        Task::Read(Question::Observe(instance, begun)) => {
            let seen = if outside.blind { Err(down()) } else { Ok(outside.things[&instance].observed) };
            Task::Told(Event::Observed(instance, begun, seen))
        }
        Task::Read(Question::Placement(instance)) => {
            let held = if outside.placement_up { Ok(outside.held(instance)) } else { Err(down()) };
            Task::Told(Event::Allocation(instance, held))
        }
        Task::Read(Question::Whose(instance)) => {
            let whose = match &outside.things[&instance].keys {
                keys if !keys.index => Whose::Nobodys,
                keys if keys.request.is_some() => Whose::Requested,
                _ => Whose::AskedFor,
            };
            Task::Told(Event::Whose(instance, if outside.etcd_up { Ok(whose) } else { Err(down()) }))
        }
        Task::Read(Question::Audit(begun)) => {
            let held = outside.things.keys().filter_map(|instance| match outside.held(*instance) {
                Held::Here(amounts) => Some((*instance, Ok(amounts))),
                Held::Nothing | Held::Elsewhere => None,
            });
            let held = if outside.placement_up { Ok(Some(held.collect())) } else { Err(down()) };
            Task::Told(Event::Audited(begun, held))
        }
        Task::Job(mut worker) => match worker.step(outside) {
            Some(report) => Task::Told(Event::Ended(report)),
            None => Task::Job(worker),
        },
        Task::Told(event) => Task::Told(event),
    }
}
