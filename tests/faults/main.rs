//! Black-box histories against the programs as they are shipped: start real parts, do the fault, look.

mod cli_check;
mod cli_placement;
mod cli_schedule;
mod cli_words;
