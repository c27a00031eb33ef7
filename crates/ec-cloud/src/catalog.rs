//! Flavors and keypairs: records that users name, and name again where they would have to say all of it.

use ec_model::{
    Flavor, Group, Image, Instance, Keypair, Node, Record, RecordError, Request, ResourceQuery, Status,
    decode, encode,
};
use ec_store::{Compare, StoreError, Txn};

use crate::{Ask, Cloud, CloudError, CloudResult, lookup::MENDS};

/// Records come and go while we look; so often is enough for anybody.
const TRIES: usize = 5;

/// Makes a flavor of a query that a virtual machine can be made of.
///
/// # Errors
/// [`CloudError::Refused`] where there is one of that name, [`CloudError::Invalid`] with what is wrong in the query.
pub async fn create_flavor(cloud: &Cloud, name: &str, query: &ResourceQuery) -> CloudResult<Flavor> {
    Ask::new(query)?;
    let flavor =
        Flavor { name: name.to_owned(), query: query.text().to_owned(), created_at: cloud.host.now() };
    create(cloud, cloud.keys.flavor(name), &flavor, |flavor| &flavor.name).await?;
    Ok(flavor)
}

/// All flavors, by name.
pub async fn flavors(cloud: &Cloud) -> CloudResult<Vec<Flavor>> {
    all(cloud, &cloud.keys.flavors()).await
}

/// The flavor of that name.
///
/// # Errors
/// [`CloudError::NotFound`] where there is none.
pub async fn flavor(cloud: &Cloud, name: &str) -> CloudResult<Flavor> {
    named(cloud, &cloud.keys.flavor(name)).await?.ok_or_else(|| missing::<Flavor>(name))
}

/// Deletes a flavor. What was made with it stays as it is.
///
/// # Errors
/// [`CloudError::NotFound`] where there is none.
pub async fn delete_flavor(cloud: &Cloud, name: &str) -> CloudResult<()> {
    delete::<Flavor>(cloud, cloud.keys.flavor(name), name).await
}

/// Gives keys a name within the project.
///
/// # Errors
/// [`CloudError::Refused`] where the project has a keypair of that name.
pub async fn add_keypair(cloud: &Cloud, name: &str, keys: Vec<String>) -> CloudResult<Keypair> {
    let project = cloud.project.clone();
    let keypair = Keypair { name: name.to_owned(), project, keys, created_at: cloud.host.now() };
    create(cloud, cloud.keys.keypair(&cloud.project, name), &keypair, |keypair| &keypair.name).await?;
    Ok(keypair)
}

/// All keypairs of the project, by name.
pub async fn keypairs(cloud: &Cloud) -> CloudResult<Vec<Keypair>> {
    all(cloud, &cloud.keys.keypairs(&cloud.project)).await
}

/// The project's keypair of that name, where there is one.
pub async fn keypair(cloud: &Cloud, name: &str) -> CloudResult<Option<Keypair>> {
    named(cloud, &cloud.keys.keypair(&cloud.project, name)).await
}

/// That the project has no keypair of that name.
pub fn no_keypair(name: &str) -> CloudError {
    missing::<Keypair>(name)
}

/// Deletes a keypair. Guests that were given its keys keep them.
///
/// # Errors
/// [`CloudError::NotFound`] where the project has none of that name.
pub async fn delete_keypair(cloud: &Cloud, name: &str) -> CloudResult<()> {
    delete::<Keypair>(cloud, cloud.keys.keypair(&cloud.project, name), name).await
}

/// Makes one where there is none, which another spelling of its name may be called.
pub(crate) async fn create<R: Record>(
    cloud: &Cloud,
    key: String,
    record: &R,
    name: impl Fn(&R) -> &str,
) -> CloudResult<()> {
    let value = encode(record);
    let txn = Txn::new().when(Compare::Absent(key.clone())).put(key.clone(), value.clone());
    match cloud.store.txn(txn).await {
        Ok(outcome) if outcome.succeeded => Ok(()),
        Ok(_) => {
            // One that nobody can read is not deleted, either.
            let there = named::<R>(cloud, &key).await?;
            Err(CloudError::Refused(format!(
                "there is a {what} `{name}` already: `eschedule {what} delete {name}` takes it away",
                what = R::WHAT,
                name = name(there.as_ref().unwrap_or(record))
            )))
        }
        // Its time of making makes it known again.
        Err(error @ StoreError::Unknown(_)) => match cloud.store.get(&key).await?.0 {
            Some(pair) if pair.value == value => Ok(()),
            _ => Err(error.into()),
        },
        Err(error) => Err(error.into()),
    }
}

async fn named<R: Record>(cloud: &Cloud, key: &str) -> CloudResult<Option<R>> {
    let pair = cloud.store.get(key).await?.0;
    pair.map(|pair| decode(&pair.value)).transpose().map_err(|error| {
        CloudError::Unreadable(format!("key {key} cannot be read: {error}; nothing was changed: {MENDS}"))
    })
}

/// In the order of their keys, which is that of their names. One that cannot be read is told, and hides no other.
pub(crate) async fn all<R: Record>(cloud: &Cloud, prefix: &str) -> CloudResult<Vec<R>> {
    let mut records = Vec::new();
    for pair in cloud.store.list(prefix).await?.pairs {
        match decode(&pair.value) {
            Ok(record) => records.push(record),
            Err(error) => (cloud.notice)(&format!("key {} cannot be read: {error}", pair.key)),
        }
    }
    Ok(records)
}

/// The keys of all projects that no program of this release can read, each with why; of what comes of itself, and goes so, none.
///
/// # Errors
/// etcd does not answer.
pub async fn unreadable(cloud: &Cloud) -> CloudResult<Vec<(String, String)>> {
    fn why<R: Record>(value: &[u8]) -> Option<RecordError> {
        decode::<R>(value).err()
    }
    type Why = fn(&[u8]) -> Option<RecordError>;
    let keys = &cloud.keys;
    let kinds: [(String, Why); 8] = [
        (keys.nodes(), why::<Node>),
        (keys.flavors(), why::<Flavor>),
        (keys.all_keypairs(), why::<Keypair>),
        (keys.all_groups(), why::<Group>),
        (keys.images(), why::<Image>),
        (keys.instances(), why::<Instance>),
        (keys.all_requests(), why::<Request>),
        (keys.all_statuses(), why::<Status>),
    ];
    let mut found = Vec::new();
    for (prefix, why) in kinds {
        for pair in cloud.store.list(&prefix).await?.pairs {
            found.extend(why(&pair.value).map(|why| (pair.key, why.to_string())));
        }
    }
    Ok(found)
}

/// A record that can be read, to be deleted as it was read; none where there is none. What cannot be read is not touched.
pub(crate) async fn deletable<R: Record>(cloud: &Cloud, key: &str) -> CloudResult<Option<(R, Compare)>> {
    let Some(pair) = cloud.store.get(key).await?.0 else { return Ok(None) };
    match decode::<R>(&pair.value) {
        Ok(record) => Ok(Some((record, Compare::Unchanged(key.to_owned(), pair.mod_revision)))),
        Err(error) => Err(CloudError::Unreadable(format!(
            "key {key} cannot be read: {error}; nothing was changed: use the release that wrote it, or delete the key with etcdctl"
        ))),
    }
}

/// What is made anew between the look and the deletion has another revision, and is what is meant by then.
async fn delete<R: Record>(cloud: &Cloud, key: String, name: &str) -> CloudResult<()> {
    for _ in 0..TRIES {
        let Some((_, unchanged)) = deletable::<R>(cloud, &key).await? else { return Err(missing::<R>(name)) };
        if cloud.store.txn(Txn::new().when(unchanged).delete(key.clone())).await?.succeeded {
            return Ok(());
        }
    }
    let what = R::WHAT;
    Err(CloudError::Busy(format!("the {what} `{name}` is deleted and made again and again; try again")))
}

/// That there is none of that name.
pub(crate) fn missing<R: Record>(name: &str) -> CloudError {
    CloudError::NotFound(format!(
        "there is no {what} `{name}`; `eschedule {what} list` shows all",
        what = R::WHAT
    ))
}
