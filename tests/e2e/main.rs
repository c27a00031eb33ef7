//! The main job on real parts, and what happens when they are killed in the middle of it.

mod boot;
mod chaos;
mod cli;
mod clients;
mod crashes;
mod data;
mod debian;
mod foreigners;
mod guests;
mod images;
mod kills;
mod kills_volumes;
mod life;
mod outages;
mod power;
mod races;
mod reach;
mod rebuild;
mod replicas;
mod rescue;
mod resize;
mod tls;
mod tutorial;
mod volumes;
