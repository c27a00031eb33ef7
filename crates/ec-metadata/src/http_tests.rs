use std::time::Instant;

use ec_model::Blob;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use super::*;
use crate::{InstanceRecord, RECORD_VERSION};

/// A server on loopback that takes everyone for the same guest.
async fn server() -> (SocketAddr, CancellationToken, tokio::task::JoinHandle<TcpListener>) {
    server_with(Arc::new(|_| Ok(Origin::Stranger))).await
}

async fn server_with(
    by_port: Arc<ByPort>,
) -> (SocketAddr, CancellationToken, tokio::task::JoinHandle<TcpListener>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let record = InstanceRecord {
        version: RECORD_VERSION,
        instance: "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap(),
        name: "web".into(),
        macs: vec![],
        base_digest: None,
        next_base_digest: None,
        next_wished_at: None,
        next_is_whole: false,
        rescue_base_digest: None,
        rebuilt: None,
        rescued: None,
        resized: None,
        resources_before: None,
        growing: None,
        intent: None,
        metadata: std::collections::BTreeMap::new(),
        keys: vec![],
        user_data: Some(Blob(vec![0, 255, 10])),
        token_required: false,
        project: String::new(),
        resources: ec_model::Resources::new(),
        started: false,
        created_at: jiff::Timestamp::UNIX_EPOCH,
    };
    let service = MetadataService::new(move |_| {
        // As long as a look at a busy disk.
        std::thread::sleep(Duration::from_millis(20));
        Ok::<_, String>(Some(record.clone()))
    });
    (address, stop.clone(), tokio::spawn(run(listener, service, by_port, stop)))
}

/// Sends, and reads until the server closes.
async fn talk(address: SocketAddr, request: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    // A reset ends the answer as well.
    let _ = timeout(Duration::from_secs(20), stream.read_to_end(&mut answer)).await.unwrap();
    answer
}

#[tokio::test]
async fn answers_are_whole_and_a_head_request_gets_the_length_without_the_body() {
    let (address, ..) = server().await;
    let get = talk(address, b"GET /latest/user-data HTTP/1.0\r\n\r\n").await;
    assert!(get.ends_with(b"\r\n\r\n\0\xff\n") && get.starts_with(b"HTTP/1.0 200 OK"), "{get:?}");
    let head =
        talk(address, b"HEAD /latest/user-data HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    let head = String::from_utf8(head).unwrap();
    assert!(head.contains("content-length: 3") && head.ends_with("\r\n\r\n"), "{head}");
    let two = b"GET /latest/meta-data/hostname HTTP/1.1\r\nhost: x\r\n\r\n\
        GET /latest/meta-data/hostname HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let answers = String::from_utf8(talk(address, two).await).unwrap();
    assert_eq!(answers.matches("\r\n\r\nweb").count(), 2, "{answers}");
}

#[tokio::test]
async fn a_look_for_who_asks_that_never_ends_keeps_nobody_out() {
    let (ends, waits) = std::sync::mpsc::channel::<()>();
    let waits = std::sync::Mutex::new(waits);
    let (address, ..) = server_with(Arc::new(move |_| {
        waits.lock().unwrap().recv().ok();
        Ok(Origin::Stranger)
    }))
    .await;
    let answer = talk(address, b"GET /latest/user-data HTTP/1.0\r\n\r\n").await;
    assert!(answer.starts_with(b"HTTP/1.0 200 OK"), "{answer:?}");
    drop(ends);
}

#[tokio::test]
async fn requests_that_are_too_big_or_too_slow_are_cut_off_and_the_next_guest_is_served() {
    let (address, ..) = server().await;
    let mut big = b"GET / HTTP/1.1\r\nhost: x\r\n".to_vec();
    big.extend(format!("x: {}\r\n\r\n", "y".repeat(HEAD_MAX)).into_bytes());
    assert!(talk(address, &big).await.starts_with(b"HTTP/1.1 431"));
    let mut many = b"GET / HTTP/1.1\r\nhost: x\r\n".to_vec();
    many.extend("a: b\r\n".repeat(HEADERS_MAX + 1).into_bytes());
    assert!(talk(address, &[&many[..], b"\r\n"].concat()).await.starts_with(b"HTTP/1.1 431"));
    assert!(talk(address, b"\x16\x03\x01 what?\r\n\r\n").await.starts_with(b"HTTP/1.1 400"));

    let begun = Instant::now();
    talk(address, b"GET / HTTP/1.1\r\nhost: x\r\n").await;
    let waited = begun.elapsed();
    assert!(waited >= HEAD_TIMEOUT && waited < HEAD_TIMEOUT * 2, "{waited:?}");
    assert!(talk(address, b"GET / HTTP/1.0\r\n\r\n").await.starts_with(b"HTTP/1.0 200"));
}

#[tokio::test]
async fn who_closes_its_half_after_the_question_gets_the_answer() {
    let (address, ..) = server().await;
    for _ in 0..20 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /latest/meta-data/hostname HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        timeout(HEAD_TIMEOUT, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("\r\n\r\nweb"), "{answer:?}");
    }
    // Half a question is no question, and is not waited for.
    let begun = Instant::now();
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /latest/meta-data/hostname HT").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut answer = Vec::new();
    let _ = timeout(HEAD_TIMEOUT, stream.read_to_end(&mut answer)).await.unwrap();
    assert!(begun.elapsed() < HEAD_TIMEOUT / 2, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn who_says_nothing_is_cut_off_and_its_connections_are_bounded() {
    let (address, ..) = server().await;
    let begun = Instant::now();
    let mut silent = Vec::new();
    for _ in 0..CONNECTIONS_PER_GUEST * 2 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    let mut early = 0;
    for stream in &mut silent {
        let _ = timeout(HEAD_TIMEOUT * 2, stream.read(&mut [0])).await.expect("it is closed in time");
        early += usize::from(begun.elapsed() < HEAD_TIMEOUT / 2);
    }
    assert!(begun.elapsed() >= HEAD_TIMEOUT && early <= CONNECTIONS_PER_GUEST, "{early}");
    assert!(talk(address, b"GET / HTTP/1.0\r\n\r\n").await.starts_with(b"HTTP/1.0 200"));
}

#[tokio::test]
async fn a_guest_that_asks_many_things_at_once_gets_all_answers() {
    let (address, ..) = server().await;
    // Each says nothing for a moment, as a program does that begins many at once.
    let asks = (0..CONNECTIONS_PER_GUEST * 5).map(async |_| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        stream.write_all(b"GET /latest/meta-data/hostname HTTP/1.0\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        timeout(HEAD_TIMEOUT, stream.read_to_string(&mut answer)).await.unwrap().map(|_| answer)
    });
    for answer in futures::future::join_all(asks).await {
        let answer = answer.expect("it is not reset");
        assert!(answer.starts_with("HTTP/1.0 200") && answer.ends_with("web"), "{answer:?}");
    }
}

#[tokio::test]
async fn a_connection_ends_after_so_many_questions() {
    let (address, ..) = server().await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut answers = Vec::new();
    let mut part = [0; 4096];
    let asked = loop {
        // It was told in the answer before.
        let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
        match timeout(HEAD_TIMEOUT / 2, stream.read(&mut part)).await.expect("it answers or ends") {
            Ok(length @ 1..) => answers.push(String::from_utf8_lossy(&part[..length]).into_owned()),
            _ => break answers.len(),
        }
        assert!(answers.len() <= QUESTIONS_MAX, "it goes on for ever");
    };
    assert_eq!(asked, QUESTIONS_MAX);
    let says_so = |answer: &&String| answer.contains("connection: close");
    assert_eq!(answers.iter().filter(says_so).count(), 1);
    assert!(says_so(&answers.last().unwrap()));
}

#[tokio::test]
async fn a_body_that_nobody_asked_for_is_not_read() {
    let (address, ..) = server().await;
    let request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\nxxxx";
    let begun = Instant::now();
    assert!(talk(address, request).await.starts_with(b"HTTP/1.1 405"));
    assert!(begun.elapsed() < HEAD_TIMEOUT * 2);
}

#[tokio::test]
async fn the_server_ends_with_connections_open_and_gives_its_listener_back() {
    let (address, stop, task) = server().await;
    let idle = TcpStream::connect(address).await.unwrap();
    let mut asking = TcpStream::connect(address).await.unwrap();
    asking.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    let begun = Instant::now();
    stop.cancel();
    let listener = timeout(DRAIN * 3, task).await.unwrap().unwrap();
    assert_eq!(listener.local_addr().unwrap(), address);
    assert!(begun.elapsed() < DRAIN * 2);
    drop((idle, asking));
}

#[tokio::test(start_paused = true)]
async fn records_that_do_not_answer_hold_so_many_threads_and_who_asks_is_told() {
    let (ends, waits) = std::sync::mpsc::channel::<()>();
    let (waits, asked) = (std::sync::Mutex::new(waits), Arc::new(std::sync::atomic::AtomicUsize::new(0)));
    let counted = Arc::clone(&asked);
    let service = MetadataService::new(move |_| {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        waits.lock().unwrap().recv().ok();
        Ok::<_, String>(None)
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(run(listener, service, Arc::new(|_| Ok(Origin::Stranger)), CancellationToken::new()));
    let so_many = || asked.load(std::sync::atomic::Ordering::Relaxed);
    for number in 0..=ANSWERS_MAX {
        let asks = talk(address, b"GET / HTTP/1.0\r\n\r\n");
        let passes = async {
            // Of the last nobody tells that it has come, since it is not asked: it has a second.
            let has_come = |looks| if number == ANSWERS_MAX { looks > 5_000 } else { so_many() > number };
            let mut looks = 0;
            while !has_come(looks) {
                tokio::task::yield_now().await;
                std::thread::sleep(Duration::from_micros(200));
                looks += 1;
            }
            tokio::time::advance(ANSWER_TIMEOUT).await;
        };
        let (answer, ()) = tokio::join!(asks, passes);
        assert!(answer.starts_with(b"HTTP/1.0 503"), "{answer:?}");
    }
    drop(ends);
    assert_eq!(so_many(), ANSWERS_MAX);
}
