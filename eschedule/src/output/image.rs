//! What images look like.

use ec_image::Size;
use ec_model::{Image, ImageRef, Visibility};
use ec_runtime::exit::Failure;

use super::{List, row, table, trimmed, when};
use crate::cli::Output;

/// A list of the images that this project may use.
pub(crate) fn images(output: Output, project: &str, images: &[Image]) -> Result<(), Failure> {
    let names = || images.iter().map(|image| called(image, project, images)).collect();
    output.print(images, names, || {
        let header = ["IMAGE", "UUID", "STATUS", "SIZE", "VISIBILITY", "PROJECT", "CREATED"];
        let mut list = List::new(&header, &[0, 2, 3], &[0, 2, 3, 4, 1, 5, 6]);
        for image in images {
            list.row([
                image.name.clone(),
                image.id.to_string(),
                image.status.name().to_owned(),
                image.size.map_or_else(|| "-".to_owned(), |size| Size(size).to_string()),
                seen(image).to_owned(),
                image.project.clone(),
                when(image.created_at),
            ]);
        }
        list.text()
    })
}

/// Its name, where that means this one to who asks: the project's own comes first, and of several others' none is meant.
fn called(image: &Image, project: &str, among: &[Image]) -> String {
    let is_namesake = |other: &Image| other.id != image.id && other.name.eq_ignore_ascii_case(&image.name);
    match image.project != project && among.iter().any(is_namesake) {
        true => image.id.to_string(),
        false => image.name.clone(),
    }
}

/// One image.
pub(crate) fn image(output: Output, image: &Image) -> Result<(), Failure> {
    output.print(image, || vec![image.name.clone()], || lines(image))
}

fn seen(image: &Image) -> &'static str {
    match image.visibility {
        Visibility::Private => "private",
        Visibility::Public => "public",
    }
}

fn lines(image: &Image) -> String {
    let mut table = table(&[]);
    let mut row = |key: &str, value: String| row(&mut table, [key.to_owned(), value]);
    row("image", image.name.clone());
    row("uuid", image.id.to_string());
    row("project", image.project.clone());
    row("visibility", seen(image).to_owned());
    row("status", image.status.name().to_owned());
    if image.protected {
        row("protected", "yes".to_owned());
    }
    // One that somebody gave may have a password or a signature in it, and a screen is seen by others.
    let url = if image.stored { image.url.clone() } else { ImageRef::at(&image.url).told() };
    row("url", url);
    for (what, digest) in [("sha256", &image.sha256), ("sha512", &image.sha512)] {
        if let Some(digest) = digest {
            row(what, digest.clone());
        }
    }
    if let Some(size) = image.size {
        let packed = image.compression.as_ref().map(|with| format!(", {with}")).unwrap_or_default();
        row("size", format!("{}{packed}", Size(size)));
    }
    if let (Some(format), Some(size)) = (&image.disk_format, image.virtual_size) {
        row("disk", format!("{format}, {}", Size(size)));
    }
    for (what, least) in [("min disk", image.min_disk), ("min ram", image.min_ram)] {
        if least > 0 {
            row(what, least.to_string());
        }
    }
    for (key, value) in &image.properties {
        row("property", format!("{key}={value}"));
    }
    row("created", image.created_at.to_string());
    row("updated", image.updated_at.to_string());
    trimmed(&table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_secret_in_a_url_is_not_shown() {
        let image = serde_json::json!({
            "id": "00000000-0000-0000-0000-000000000001", "name": "x", "project": "p", "status": "active",
            "url": "https://user:secret@host/x.qcow2?signature=secret",
            "created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z",
        });
        let text = lines(&serde_json::from_value(image).unwrap());
        assert!(text.contains("https://host/x.qcow2?…") && !text.contains("secret"), "{text}");
    }
}
