//! What is asked for once is found by one id: in the command's answer, in etcd, and in the logs of all who act upon it.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use ec_model::{Actions, Instance, InstanceId, Keyspace, Request, RequestId, decode, encode};
use ec_store::{Store, Txn};
use ec_tests::{Running, Stack, TINY, control::unplaced, program};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

const GIVEN: &str = "req-7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";

fn start(mut command: Command, log: &Path) -> Result<Running> {
    let log = fs::File::create(log)?;
    let child =
        command.env("LOG_FORMAT", "json").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn()?;
    Ok(Running(child))
}

/// The lines of a log, each of which is an object.
fn lines(path: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(path)?;
    // The last may be half written.
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    whole
        .lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("{}: {line}", path.display())))
        .collect()
}

/// The lines that are about an instance.
fn about(log: &[Value], instance: InstanceId) -> Vec<&Value> {
    log.iter().filter(|line| line["instance"] == instance.to_string()).collect()
}

fn says(line: &Value, word: &str) -> bool {
    line["message"].as_str().is_some_and(|message| message.contains(word))
}

/// The fields that docs/operations.md tells.
fn told() -> BTreeSet<&'static str> {
    let page = include_str!("../../docs/operations.md");
    let section =
        page.split("## Logs\n").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap_or_default();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split(" |").next());
    cells.flat_map(|cell| cell.split(", ")).map(|field| field.trim_matches('`')).collect()
}

fn asked(stack: &Stack, arguments: &[&str]) -> Result<Value> {
    let output = stack.eschedule(&[&["-o", "json"], arguments].concat())?;
    ensure!(output.status.success(), "{arguments:?}: {output:?}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn one_id_is_in_the_answer_in_etcd_and_in_all_logs() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.agent_env.push(("LOG_FORMAT", "json".to_owned()));
    stack.start_agent("").await?;
    let keys = Keyspace::default();

    // What a killed command left, with its id.
    let left = InstanceId::new(uuid::Uuid::new_v4());
    let long_ago = Timestamp::now() - SignedDuration::from_mins(20);
    let left_by: RequestId = "req-00000000-0000-4000-8000-000000000001".parse()?;
    let record = Instance { request_id: Some(left_by), ..unplaced(left, None, "default", long_ago) };
    stack.store.txn(Txn::new().put(keys.instance(left), encode(&record))).await?;

    let made = asked(&stack, &["--name", "web", TINY])?;
    let id = made["request_id"].as_str().context("it tells its id")?.to_owned();
    let wanted: RequestId = id.parse()?;
    let instance: InstanceId = made["instance"].as_str().context("it is placed")?.parse()?;
    let request: Request =
        decode(&stack.store.get(&keys.request(stack.node, instance)).await?.0.context("a request")?.value)?;
    let record: Instance =
        decode(&stack.store.get(&keys.instance(instance)).await?.0.context("a record")?.value)?;
    let actions: Actions =
        decode(&stack.store.get(&keys.actions(instance)).await?.0.context("actions")?.value)?;
    assert_eq!([request.request_id, record.request_id, actions.actions[0].request_id], [Some(wanted); 3]);
    assert_eq!(asked(&stack, &["show", "web"])?["request_id"], id);

    let (agent, placement) = (stack.file("ecompute.log"), stack.file("placement.log"));
    stack
        .until("the guest is started", async || {
            Ok(about(&lines(&agent)?, instance).iter().any(|line| says(line, "STARTED INSTANCE")))
        })
        .await?;
    let log = lines(&agent)?;
    for line in about(&log, instance) {
        assert_eq!(
            (line["request_id"].as_str(), line["node"].as_str()),
            (Some(id.as_str()), Some(stack.node.to_string().as_str())),
            "{line}"
        );
    }
    assert!(about(&log, instance).iter().any(|line| says(line, "INSTANTIATE INSTANCE")), "{log:?}");
    let log = lines(&placement)?;
    let claims: Vec<_> = about(&log, instance).into_iter().filter(|line| line["method"] == "PUT").collect();
    assert!(!claims.is_empty(), "{log:?}");
    for claim in claims {
        assert_eq!(
            (claim["request_id"].as_str(), claim["status"].as_u64()),
            (Some(id.as_str()), Some(204)),
            "{claim}"
        );
        assert!(
            claim["local_request_id"].as_str().is_some_and(|own| own.starts_with("req-") && own != id),
            "{claim}"
        );
    }

    // The next command has its own, here one that its user has.
    let done = asked(&stack, &["--request-id", GIVEN, "destroy", "--wait", "web"])?;
    assert_eq!(done["request_id"], GIVEN);
    // It is said a moment after it is so.
    stack
        .until("the agent says that it ended", async || {
            let log = lines(&agent)?;
            let ended = about(&log, instance).into_iter().find(|line| says(line, "ENDED INSTANCE"));
            Ok(ended.is_some_and(|line| line["request_id"] == GIVEN))
        })
        .await?;
    let log = lines(&placement)?;
    let released =
        about(&log, instance).into_iter().find(|line| line["method"] == "DELETE").context("a release")?;
    assert_eq!(released["request_id"], GIVEN);
    let events = asked(&stack, &["events", &instance.to_string()])?;
    let ids: Vec<&Value> =
        events.as_array().into_iter().flatten().map(|event| &event["request_id"]).collect();
    assert!(ids.contains(&&Value::from(id)) && ids.contains(&&Value::from(GIVEN)), "{events}");

    // A controller acts for whoever was killed.
    let config = stack.file("controller.yaml");
    let (etcd, endpoint) = (stack.etcd.endpoint(), stack.placement_server.endpoint());
    fs::write(
        &config,
        format!(
            "etcd: {{endpoints: [\"{etcd}\"]}}\nplacement: {{endpoint: \"{endpoint}\"}}\nlisten: 127.0.0.1:0\n"
        ),
    )?;
    let mut command = Command::new(program("econtroller"));
    command.arg("--config").arg(config);
    let controller = stack.file("econtroller.log");
    let _controller = start(command, &controller)?;
    let mut command = Command::new(program("mdserver"));
    command
        .args(["--bridge", stack.libvirt.bridge(), "--listen", "none", "--state-dir"])
        .arg(stack.file("state"));
    let metadata = stack.file("mdserver.log");
    let _metadata = start(command, &metadata)?;
    stack
        .until("the controller takes away what was left", async || {
            let log = lines(&controller)?;
            Ok(about(&log, left).iter().any(|line| line["request_id"] == left_by.to_string()))
        })
        .await?;
    stack.until("mdserver says something", async || Ok(!lines(&metadata)?.is_empty())).await?;

    let told = told();
    for log in [agent, placement, controller, metadata] {
        for line in lines(&log)? {
            let fields: BTreeSet<&str> =
                line.as_object().context("an object")?.keys().map(String::as_str).collect();
            assert!(["timestamp", "level", "message"].iter().all(|field| fields.contains(field)), "{line}");
            let untold: Vec<_> = fields.difference(&told).collect();
            assert!(
                untold.is_empty(),
                "{} has fields that docs/operations.md does not tell: {untold:?}",
                log.display()
            );
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_came_about_elsewhere_names_the_command_and_one_that_is_the_users_own_does_not()
-> Result<()> {
    let mut stack = Stack::start().await?;
    stack.placement_server.end();
    let away = stack.eschedule(&["--request-id", GIVEN, TINY])?;
    let said = String::from_utf8_lossy(&away.stderr);
    assert_eq!(away.status.code(), Some(3), "{said}");
    assert!(said.contains(&format!("({GIVEN})")), "{said}");
    let own = stack.eschedule(&["--request-id", GIVEN, "stop", "nobody"])?;
    let said = String::from_utf8_lossy(&own.stderr);
    assert!(own.status.code() == Some(1) && !said.contains("req-"), "{said}");
    let wrong = stack.eschedule(&["--request-id", "mine", "list"])?;
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(wrong.status.code() == Some(2) && said.contains("wanted the form req-"), "{said}");
    Ok(())
}
