//! Values that nobody reads who has only etcd, or a backup of it: sealed on their way there, and opened on their way back.
//!
//! ```text
//!   NUL "sealed1" ‖ which key (8 bytes of its SHA-256) ‖ nonce (12) ‖ AES-256-GCM of the value ‖ tag (16)
//! ```
//!
//! What is sealed is bound to the last part of its key, the instance: it cannot be put in another's place, and may go from one
//! node to another.

use std::{fs, path::Path, sync::Arc};

use async_trait::async_trait;
use ec_runtime::Renewed;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use sha2::{Digest, Sha256};

use crate::{KeyValue, Layer, Op, Revision, Store, StoreError, StoreResult, Txn, TxnOutcome};

/// What is sealed begins so; no text does.
const MARK: &[u8] = b"\0sealed1";
/// Bytes by which a key is known.
const ID: usize = 8;

/// A store of which values below some prefixes are sealed, where there is a key.
pub struct Sealed {
    inner: Arc<dyn Store>,
    under: Vec<String>,
    keys: Option<Renewed<Arc<Keys>, StoreError>>,
}

/// The first seals, all open.
struct Keys(Vec<Key>);

struct Key {
    id: [u8; ID],
    key: LessSafeKey,
}

impl Sealed {
    /// Seals what is written under these prefixes with the first key of the file, and opens with any of them; the file may be
    /// written anew while this runs. Without a file nothing is sealed, and what is sealed is not opened.
    ///
    /// # Errors
    /// The file cannot be read, or holds something else than keys.
    pub fn new(inner: Arc<dyn Store>, file: Option<&Path>, under: Vec<String>) -> StoreResult<Self> {
        let keys = file.map(|file| {
            let path = file.to_owned();
            Renewed::new([file.to_owned()], move || Keys::read(&path).map(Arc::new))
        });
        Ok(Self { inner, under, keys: keys.transpose()? })
    }

    fn concerns(&self, key: &str) -> bool {
        self.under.iter().any(|prefix| key.starts_with(prefix))
    }

    fn seal(&self, key: &str, value: Vec<u8>) -> StoreResult<Vec<u8>> {
        match &self.keys {
            Some(keys) => keys.now().seal(key, value),
            // It would be taken for something that it is not.
            None if value.starts_with(MARK) => {
                Err(StoreError::Invalid(format!("the value for {key} looks as if it were sealed already")))
            }
            None => Ok(value),
        }
    }

    fn open(&self, pair: KeyValue) -> StoreResult<KeyValue> {
        if !self.concerns(&pair.key) {
            return Ok(pair);
        }
        let Some(sealed) = pair.value.strip_prefix(MARK) else { return Ok(pair) };
        let none = "it is sealed, and no etcd.user_data_key is configured here".to_owned();
        let opened = self.keys.as_ref().map_or_else(|| Err(none), |keys| keys.now().open(&pair.key, sealed));
        let value =
            opened.map_err(|why| StoreError::Invalid(format!("{} cannot be opened: {why}", pair.key)))?;
        Ok(KeyValue { value, ..pair })
    }
}

/// What a value is bound to.
fn bound_to(key: &str) -> Aad<&[u8]> {
    Aad::from(key.rsplit('/').next().unwrap_or(key).as_bytes())
}

impl Keys {
    fn read(file: &Path) -> StoreResult<Self> {
        let place = file.display();
        let text = fs::read_to_string(file).map_err(|error| {
            StoreError::Invalid(format!("etcd.user_data_key {place} cannot be read: {error}"))
        })?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let keys = lines.map(Key::parse).collect::<Option<Vec<_>>>().filter(|keys| !keys.is_empty());
        keys.map(Self).ok_or_else(|| {
            StoreError::Invalid(format!(
                "etcd.user_data_key {place} is no list of keys: wanted 64 hexadecimal digits a line, as `openssl rand \
                 -hex 32` prints them"
            ))
        })
    }

    fn seal(&self, key: &str, mut value: Vec<u8>) -> StoreResult<Vec<u8>> {
        let failed = || StoreError::Invalid(format!("the value for {key} cannot be sealed"));
        let first = self.0.first().ok_or_else(failed)?;
        let nonce: [u8; NONCE_LEN] = rand::random();
        let sealing = Nonce::assume_unique_for_key(nonce);
        first.key.seal_in_place_append_tag(sealing, bound_to(key), &mut value).map_err(|_| failed())?;
        Ok([MARK, &first.id, &nonce, &value].concat())
    }

    fn open(&self, key: &str, sealed: &[u8]) -> Result<Vec<u8>, String> {
        let (Some((id, rest)), damaged) = (sealed.split_at_checked(ID), || "it is damaged".to_owned()) else {
            return Err("it is cut off".to_owned());
        };
        let Some(own) = self.0.iter().find(|own| own.id == id) else {
            return Err("the key that it was sealed with is not in etcd.user_data_key".to_owned());
        };
        let (nonce, rest) = rest.split_at_checked(NONCE_LEN).ok_or_else(damaged)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| damaged())?;
        let mut value = rest.to_vec();
        let opened = own.key.open_in_place(nonce, bound_to(key), &mut value).map_err(|_| damaged())?;
        Ok(opened.to_vec())
    }
}

impl Key {
    fn parse(line: &str) -> Option<Self> {
        let bytes: Option<Vec<u8>> = (0..line.len())
            .step_by(2)
            .map(|at| line.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok()))
            .collect();
        let bytes = bytes?;
        let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &bytes).ok()?);
        let digest = Sha256::digest(&bytes);
        let mut id = [0; ID];
        id.copy_from_slice(digest.get(..ID)?);
        Some(Self { id, key })
    }
}

#[async_trait]
impl Layer for Sealed {
    fn inner(&self) -> &dyn Store {
        self.inner.as_ref()
    }

    async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)> {
        let (pair, revision) = self.inner.get(key).await?;
        Ok((pair.map(|pair| self.open(pair)).transpose()?, revision))
    }

    async fn txn(&self, mut txn: Txn) -> StoreResult<TxnOutcome> {
        for op in &mut txn.then {
            if let Op::Put { key, value, .. } = op
                && self.concerns(key)
            {
                *value = self.seal(key, std::mem::take(value))?;
            }
        }
        self.inner.txn(txn).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    struct Bench {
        directory: tempfile::TempDir,
        store: Arc<MemoryStore>,
    }

    impl Bench {
        fn new() -> Self {
            Self { directory: tempfile::tempdir().unwrap(), store: Arc::new(MemoryStore::new()) }
        }

        fn with(&self, keys: Option<&str>) -> StoreResult<Sealed> {
            let file = self.directory.path().join("key");
            fs::write(&file, keys.unwrap_or_default()).unwrap();
            let store: Arc<dyn Store> = self.store.clone();
            Sealed::new(store, keys.map(|_| file.as_path()), vec!["/userdata/".into()])
        }

        async fn raw(&self, key: &str) -> Vec<u8> {
            Store::get(&*self.store, key).await.unwrap().0.unwrap().value
        }
    }

    async fn read(store: &Sealed, key: &str) -> Result<Vec<u8>, String> {
        let found = Store::get(store, key).await.map_err(|error| error.to_string())?;
        Ok(found.0.unwrap().value)
    }

    #[tokio::test]
    async fn what_is_under_the_prefix_is_sealed_and_comes_back_as_it_was() {
        let bench = Bench::new();
        let store = bench.with(Some(A)).unwrap();
        let txn = Txn::new().put("/userdata/n/i", "secret").put("/other/i", "open").put("/userdata/n/e", "");
        Store::txn(&store, txn).await.unwrap();
        let sealed = bench.raw("/userdata/n/i").await;
        assert!(sealed.starts_with(MARK) && !sealed.windows(6).any(|part| part == b"secret"));
        assert_eq!(bench.raw("/other/i").await, b"open");
        assert_eq!(read(&store, "/userdata/n/i").await.unwrap(), b"secret");
        assert_eq!(read(&store, "/userdata/n/e").await.unwrap(), b"");
        assert_eq!(read(&store, "/other/i").await.unwrap(), b"open");
        // Each time otherwise.
        Store::txn(&store, Txn::new().put("/userdata/n/i", "secret")).await.unwrap();
        assert_ne!(bench.raw("/userdata/n/i").await, sealed);

        // The same instance on another node, and another instance.
        let moved = Txn::new().put("/userdata/m/i", sealed.clone()).put("/userdata/n/j", sealed);
        Store::txn(&*bench.store, moved).await.unwrap();
        assert_eq!(read(&store, "/userdata/m/i").await.unwrap(), b"secret");
        assert!(read(&store, "/userdata/n/j").await.unwrap_err().contains("/userdata/n/j cannot be opened"));
    }

    #[tokio::test]
    async fn a_new_key_seals_an_old_one_opens_and_without_either_it_is_told() {
        let bench = Bench::new();
        let plain = bench.with(None).unwrap();
        Store::txn(&plain, Txn::new().put("/userdata/n/0", "before")).await.unwrap();
        let old = bench.with(Some(A)).unwrap();
        Store::txn(&old, Txn::new().put("/userdata/n/1", "old")).await.unwrap();
        let both = bench.with(Some(&format!("{B}\n\n {A} \n"))).unwrap();
        Store::txn(&both, Txn::new().put("/userdata/n/2", "new")).await.unwrap();
        for (number, value) in [(0, "before"), (1, "old"), (2, "new")] {
            assert_eq!(read(&both, &format!("/userdata/n/{number}")).await.unwrap(), value.as_bytes());
        }
        let none = read(&plain, "/userdata/n/1").await.unwrap_err();
        assert!(none.contains("no etcd.user_data_key"), "{none}");
        let other = read(&bench.with(Some(A)).unwrap(), "/userdata/n/2").await.unwrap_err();
        assert!(other.contains("is not in etcd.user_data_key"), "{other}");
        let mut damaged = bench.raw("/userdata/n/1").await;
        for length in [MARK.len(), MARK.len() + ID, MARK.len() + ID + NONCE_LEN, damaged.len() - 1] {
            let cut = Txn::new().put("/userdata/n/1", damaged[..length].to_vec());
            Store::txn(&*bench.store, cut).await.unwrap();
            assert!(read(&both, "/userdata/n/1").await.is_err(), "{length}");
        }
        *damaged.last_mut().unwrap() ^= 1;
        Store::txn(&*bench.store, Txn::new().put("/userdata/n/1", damaged.clone())).await.unwrap();
        assert!(read(&both, "/userdata/n/1").await.unwrap_err().contains("damaged"));
        assert!(Store::txn(&plain, Txn::new().put("/userdata/n/1", damaged)).await.is_err());
    }

    #[test]
    fn a_file_that_holds_no_keys_is_refused_by_name() {
        let bench = Bench::new();
        for text in ["", "\n", "abc", &A[1..], &format!("{A}\nx"), &format!("{A}00"), "é"] {
            let error = bench.with(Some(text)).err().unwrap().to_string();
            assert!(error.contains("user_data_key") && error.contains("64 hexadecimal"), "{text}: {error}");
        }
        let store: Arc<dyn Store> = bench.store.clone();
        let error = Sealed::new(store, Some(Path::new("/nowhere/key")), vec![]).err().unwrap().to_string();
        assert!(error.contains("/nowhere/key cannot be read"), "{error}");
    }
}
