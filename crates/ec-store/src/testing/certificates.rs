//! Certificates for one test.

use std::{fs, io, path::Path, process::Command};

fn openssl(directory: &Path, arguments: &str) -> io::Result<()> {
    let output =
        Command::new("openssl").args(arguments.split_whitespace()).current_dir(directory).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!("openssl {arguments}: {output:?}"))),
    }
}

/// Whose the node's certificate is.
const NODE: &str = "ecompute-7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";

/// An authority, and a server's, a client's and a node's certificate of it: `ca`, `server`, `client` and `node`, each with
/// `.pem` and `.key`.
///
/// # Errors
/// `openssl` is not there, or what it said.
pub fn certificates(directory: &Path) -> io::Result<()> {
    // Named by its directory: two of one name would be taken for the same one, with a wrong signature.
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    openssl(
        directory,
        &format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca-{name} -keyout ca.key -out ca.pem"
        ),
    )?;
    // The client's is good for nothing but being one.
    let wanted = [
        ("server", "server", "subjectAltName=DNS:localhost,IP:127.0.0.1\n"),
        ("client", "client", "extendedKeyUsage=clientAuth\n"),
        ("node", NODE, "extendedKeyUsage=clientAuth\n"),
    ];
    for (name, whose, extension) in wanted {
        openssl(
            directory,
            &format!(
                "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={whose} -keyout {name}.key -out {name}.csr"
            ),
        )?;
        fs::write(directory.join("ext"), extension)?;
        openssl(
            directory,
            &format!(
                "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext -out {name}.pem"
            ),
        )?;
    }
    Ok(())
}
