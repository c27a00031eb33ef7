//! All that is written is valid by libvirt's own schemas: libvirt itself passes over what it does not know.

use std::path::PathBuf;

use ec_hypervisor::DomainSpec;
use ec_model::{BaseImage, DiskFormat};

use super::{DomainXml, Machine, PoolXml, VolumeFile, VolumeXml, write};
use crate::testing::assert_valid;

const FLAGS: [bool; 2] = [false, true];

fn specs() -> [DomainSpec; 3] {
    let spec = |title: &str, vcpus, memory_mb| DomainSpec {
        instance: "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap(),
        title: title.into(),
        vcpus,
        memory_mb,
        volumes: Vec::new(),
    };
    // As it was made, as it was resized, and what nobody would call a name.
    [spec("web", 1, 128), spec("", 64, 1 << 20), spec("</title><x a='\"'>&\n\u{1b}é", 1, 1)]
}

fn volumes() -> Vec<VolumeFile> {
    let serial = || "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".to_owned();
    ["vdb", "vdz"]
        .map(|device| VolumeFile {
            file: "/pool/a&b 'c'/v.qcow2".into(),
            device: device.into(),
            serial: serial(),
        })
        .into()
}

#[test]
fn every_domain_is_valid_by_libvirts_schema() {
    let mut documents = Vec::new();
    for kvm in FLAGS {
        // With them is a libvirt of today, without an old one.
        for (maximum_cpu, translation_cache) in [(false, false), (true, false), (true, true)] {
            for bridge in [None, Some("br0".to_owned())] {
                for graphics in FLAGS {
                    for rescue in [None, Some("/pool/x.rescue.qcow2".to_owned())] {
                        let machine = Machine {
                            node: "11111111-2222-4333-8444-555555555555".parse().unwrap(),
                            kvm,
                            maximum_cpu,
                            translation_cache,
                            network: "default".into(),
                            bridge: bridge.clone(),
                            graphics,
                            disk: "/pool/a&b 'c'/x.qcow2".into(),
                            serial: graphics.then(|| "v".to_owned()),
                            rescue,
                            volumes: if graphics { volumes() } else { Vec::new() },
                            console: "/log/a&b 'c'/x.log".into(),
                        };
                        let spec = &specs()[documents.len() % 3];
                        documents.push(write(&DomainXml::new(spec, &machine)).unwrap());
                    }
                }
            }
        }
    }
    assert_eq!(documents.len(), 48);
    for document in documents {
        assert_valid(&document, "domain");
    }
}

#[test]
fn every_pool_and_volume_is_valid_by_libvirts_schema() {
    assert_valid(&write(&PoolXml::directory("ecompute", "/pool/a&b 'c'")).unwrap(), "storagepool");
    for format in [DiskFormat::Raw, DiskFormat::Qcow2] {
        let base = BaseImage {
            path: PathBuf::from("/cache/a&b 'c'.img"),
            format,
            virtual_size: 1000,
            digest: String::new(),
        };
        for name in ["x.qcow2", "x.next.qcow2", "x.rescue.qcow2"] {
            assert_valid(&write(&VolumeXml::overlay(name, &base, 1000).unwrap()).unwrap(), "storagevol");
        }
    }
    assert_valid(&write(&VolumeXml::alone("x.qcow2", 1 << 30)).unwrap(), "storagevol");
}

#[test]
#[should_panic(expected = "not valid by the schema `domain`")]
fn what_is_not_valid_is_told() {
    assert_valid("<domain type='qemu'><name>x</name><nonsense/></domain>", "domain");
}
