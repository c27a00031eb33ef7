//! Answers of others, of which no more is kept than is good for us.

use reqwest::Response;

/// All that is answered; none where that is more than so many bytes.
pub(crate) async fn read(mut answer: Response, most: usize) -> reqwest::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    while let Some(piece) = answer.chunk().await? {
        bytes.extend_from_slice(&piece);
        if bytes.len() > most {
            return Ok(None);
        }
    }
    Ok(Some(bytes))
}
