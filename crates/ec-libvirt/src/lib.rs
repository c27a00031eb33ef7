//! libvirt behind the hypervisor trait; the only crate that knows the bindings.
