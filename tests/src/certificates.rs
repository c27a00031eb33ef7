//! Certificates for one test.

use std::{fs, path::Path, process::Command};

use anyhow::{Result, ensure};

fn openssl(directory: &Path, arguments: &str) -> Result<()> {
    let output =
        Command::new("openssl").args(arguments.split_whitespace()).current_dir(directory).output()?;
    ensure!(output.status.success(), "openssl {arguments}: {output:?}");
    Ok(())
}

/// An authority, and a server's and a client's certificate of it: `ca`, `server` and `client`, each with `.pem` and `.key`.
pub fn certificates(directory: &Path) -> Result<()> {
    openssl(
        directory,
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem",
    )?;
    for name in ["server", "client"] {
        openssl(
            directory,
            &format!(
                "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"
            ),
        )?;
        fs::write(directory.join("ext"), "subjectAltName=DNS:localhost,IP:127.0.0.1\n")?;
        openssl(
            directory,
            &format!(
                "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext -out {name}.pem"
            ),
        )?;
    }
    Ok(())
}
