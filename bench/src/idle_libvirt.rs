//! A process that holds one libvirt connection open and does nothing else, until its standard input ends:
//! what of an agent's memory is libvirt and the libraries below it.

use std::{
    error::Error,
    io::{Read, Write, stdin, stdout},
};

use virt::connect::Connect;

fn main() -> Result<(), Box<dyn Error>> {
    let uri = std::env::args().nth(1).ok_or("the connection's URI is wanted")?;
    let _connect = Connect::open(Some(&uri))?;
    writeln!(stdout(), "connected")?;
    stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
