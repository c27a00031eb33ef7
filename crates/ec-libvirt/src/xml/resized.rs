//! A domain's document as somebody may have changed it, with another size: what says how large it is is written anew, what
//! makes it larger beside that goes, and all else stays as it is.

use ec_hypervisor::{DomainSpec, Room};
use quick_xml::{
    Reader, Writer,
    events::{BytesStart, BytesText, Event},
};

use super::domain::SLOTS;

/// The document with the processors and the memory of the spec, and room for more by [`Room`]; why not, where that cannot be said
/// in it.
pub(crate) fn resized(document: &str, spec: &DomainSpec) -> Result<String, String> {
    let mut domain = Element::read(document)?;
    let is_emulated = domain.attribute("type")?.as_deref() != Some("kvm");
    let room = Room::of(spec.vcpus, spec.memory_mb, is_emulated);
    // Which of the processors are there, one by one, and how much of the memory: without these it is all that the rest says.
    domain.remove("vcpus");
    domain.remove("currentMemory");
    if let Some(devices) = domain.find("devices") {
        devices.remove("memory");
    }
    domain.change("memory", |memory| memory.measure(spec.memory_mb))?;
    match room.memory_mb {
        None => domain.remove("maxMemory"),
        Some(most) => domain.change("maxMemory", |max_memory| {
            if max_memory.attribute("slots")?.is_none() {
                max_memory.set("slots", &SLOTS.to_string())?;
            }
            max_memory.measure(most)
        })?,
    }
    domain.change("vcpu", |vcpu| {
        vcpu.set_text(room.vcpus);
        vcpu.set("current", &spec.vcpus.to_string())
    })?;
    resize_cpu(&mut domain, spec.memory_mb, room)?;
    domain.write()
}

/// Has its topology come to so many processors, and its NUMA cell have them and all memory.
fn resize_cpu(domain: &mut Element<'_>, memory_mb: u64, room: Room) -> Result<(), String> {
    // Memory that comes later wants a cell.
    let wants_cell = room.memory_mb.is_some();
    if domain.find("cpu").is_none() && !wants_cell {
        return Ok(());
    }
    domain.change("cpu", |cpu| {
        if let Some(topology) = cpu.find("topology")
            && topology.product()? != Some(room.vcpus)
        {
            *topology = Element::new("topology");
            for (level, count) in [("sockets", 1), ("cores", room.vcpus), ("threads", 1)] {
                topology.set(level, &count.to_string())?;
            }
        }
        if cpu.find("numa").is_none() && !wants_cell {
            return Ok(());
        }
        cpu.change("numa", |numa| {
            if numa.count("cell") > 1 {
                return Err(
                    "how large each of several NUMA cells is to be knows only who made them".to_owned()
                );
            }
            numa.change("cell", |cell| {
                cell.set("id", "0")?;
                cell.set("cpus", &format!("0-{}", room.vcpus.saturating_sub(1)))?;
                cell.set("memory", &memory_mb.to_string())?;
                cell.set("unit", "MiB")
            })
        })
    })
}

/// An element with all that is in it.
struct Element<'a> {
    tag: BytesStart<'a>,
    inside: Vec<Node<'a>>,
}

enum Node<'a> {
    Element(Element<'a>),
    /// Text and whatever else there may be, as it was read.
    Other(Event<'a>),
}

impl<'a> Element<'a> {
    fn new(name: &'static str) -> Self {
        Self { tag: BytesStart::new(name), inside: Vec::new() }
    }

    /// The document's own.
    fn read(document: &'a str) -> Result<Self, String> {
        let mut reader = Reader::from_str(document);
        let mut open: Vec<Self> = Vec::new();
        loop {
            let whole = match reader.read_event().map_err(unreadable)? {
                Event::Start(tag) => {
                    open.push(Self { tag, inside: Vec::new() });
                    continue;
                }
                Event::Empty(tag) => Some(Self { tag, inside: Vec::new() }),
                Event::End(_) => open.pop(),
                Event::Eof => None,
                other => {
                    // What stands beside the document's own element is nothing that libvirt writes.
                    if let Some(parent) = open.last_mut() {
                        parent.inside.push(Node::Other(other));
                    }
                    continue;
                }
            };
            let whole = whole.ok_or_else(|| unreadable("it ends before its end"))?;
            match open.last_mut() {
                Some(parent) => parent.inside.push(Node::Element(whole)),
                None => return Ok(whole),
            }
        }
    }

    fn write(&self) -> Result<String, String> {
        let mut writer = Writer::new(Vec::new());
        self.write_to(&mut writer).map_err(|error| format!("could not write XML: {error}"))?;
        String::from_utf8(writer.into_inner()).map_err(|error| format!("could not write XML: {error}"))
    }

    fn write_to(&self, writer: &mut Writer<Vec<u8>>) -> std::io::Result<()> {
        if self.inside.is_empty() {
            return writer.write_event(Event::Empty(self.tag.borrow()));
        }
        writer.write_event(Event::Start(self.tag.borrow()))?;
        for node in &self.inside {
            match node {
                Node::Element(element) => element.write_to(writer)?,
                Node::Other(event) => writer.write_event(event.borrow())?,
            }
        }
        writer.write_event(Event::End(self.tag.to_end()))
    }

    fn is(&self, name: &str) -> bool {
        self.tag.name().as_ref() == name
    }

    fn count(&self, name: &str) -> usize {
        self.inside.iter().filter(|node| matches!(node, Node::Element(element) if element.is(name))).count()
    }

    /// The first of that name in it.
    fn find(&mut self, name: &str) -> Option<&mut Self> {
        self.inside.iter_mut().find_map(|node| match node {
            Node::Element(element) if element.is(name) => Some(element),
            Node::Element(_) | Node::Other(_) => None,
        })
    }

    /// Changes the first of that name in it; a new one, at the end, where there is none.
    fn change(
        &mut self,
        name: &'static str,
        change: impl FnOnce(&mut Self) -> Result<(), String>,
    ) -> Result<(), String> {
        if let Some(found) = self.find(name) {
            return change(found);
        }
        let mut new = Self::new(name);
        change(&mut new)?;
        self.inside.push(Node::Element(new));
        Ok(())
    }

    fn remove(&mut self, name: &str) {
        self.inside.retain(|node| !matches!(node, Node::Element(element) if element.is(name)));
    }

    /// The value as it is written, which for those that are asked for is as it is meant.
    fn attribute(&self, name: &str) -> Result<Option<String>, String> {
        let found = self.tag.try_get_attribute(name).map_err(unreadable)?;
        Ok(found.map(|attribute| attribute.value.into_owned()))
    }

    /// Of numbers, that of all its attributes; nothing where one is none.
    fn product(&self) -> Result<Option<u64>, String> {
        let mut product = Some(1_u64);
        for attribute in self.tag.attributes() {
            let number = attribute.map_err(unreadable)?.value.parse().ok();
            product = product.zip(number).and_then(|(product, number)| product.checked_mul(number));
        }
        Ok(product)
    }

    /// Gives it that attribute, and keeps all others.
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let before = self.tag.to_owned();
        self.tag.clear_attributes();
        for attribute in before.attributes() {
            let attribute = attribute.map_err(unreadable)?;
            if attribute.key.as_ref() != name {
                self.tag.push_attribute(attribute);
            }
        }
        self.tag.push_attribute((name, value));
        Ok(())
    }

    fn set_text(&mut self, number: u64) {
        self.inside = vec![Node::Other(Event::Text(BytesText::from_escaped(number.to_string())))];
    }

    /// So much memory.
    fn measure(&mut self, mib: u64) -> Result<(), String> {
        self.set_text(mib);
        self.set("unit", "MiB")
    }
}

fn unreadable(error: impl std::fmt::Display) -> String {
    format!("could not read libvirt's XML: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(vcpus: u64, memory_mb: u64) -> DomainSpec {
        DomainSpec {
            instance: "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap(),
            title: "ours".into(),
            vcpus,
            memory_mb,
            volumes: Vec::new(),
        }
    }

    /// What is of the size within what somebody made of the rest.
    fn edited(size: &str, cpu: &str, dimm: &str) -> String {
        format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\n  <title>a &amp; &#x27;b&#x27;</title>\n  \
             {size}<cputune><shares>512</shares></cputune>\n  <cpu mode='maximum' check='none'>{cpu}<feature policy='disable' name='x2apic'/></cpu>\n  \
             <devices>{dimm}<disk type='file' device='disk'><source file='/srv/&quot;x&quot;.raw'/><target dev='vdx'/></disk></devices>\n  \
             <qemu:commandline><qemu:arg value='-s'/></qemu:commandline>\n</domain>"
        )
    }

    const DIMM: &str =
        "<memory model='dimm'><target><size unit='KiB'>524288</size><node>0</node></target></memory>";

    #[test]
    fn only_what_says_how_large_it_is_is_another() {
        let small = "<memory unit='KiB' dumpCore='off'>131072</memory><currentMemory unit='KiB'>65536</currentMemory>\
                     <vcpu placement='static' cpuset='0-3'>1</vcpu>";
        let document = edited(small, "<topology sockets='1' cores='1' threads='1'/>", "");
        // Room for more memory wants slots and a cell, which come behind the rest.
        let large = resized(&document, &spec(2, 1024)).unwrap();
        let size = r#"<memory dumpCore="off" unit="MiB">1024</memory><vcpu placement="static" cpuset="0-3" current="2">2</vcpu>"#;
        let wanted = edited(size, r#"<topology sockets="1" cores="2" threads="1"/>"#, "")
            .replace("</cpu>", r#"<numa><cell id="0" cpus="0-1" memory="1024" unit="MiB"/></numa></cpu>"#)
            .replace("</domain>", r#"<maxMemory slots="16" unit="MiB">4096</maxMemory></domain>"#);
        assert_eq!(large, wanted);
        assert_eq!(resized(&large, &spec(2, 1024)).unwrap(), large, "it is so already");

        // What was given to it beside, one by one, is not added to that.
        let grown = "<maxMemory slots='32' unit='KiB'>8388608</maxMemory><memory unit='KiB'>1572864</memory>\
                     <vcpu placement='static' current='2'>4</vcpu><vcpus><vcpu id='0' enabled='yes'/></vcpus>";
        let numa = |cells: &str| {
            format!("<topology sockets='1' dies='1' cores='4' threads='1'/><numa>{cells}</numa>")
        };
        let cell = "<cell id='0' cpus='0-3' memory='1048576' unit='KiB' memAccess='shared'/>";
        let document = edited(grown, &numa(cell), DIMM);
        let size = r#"<maxMemory slots="32" unit="MiB">6144</maxMemory><memory unit="MiB">1536</memory><vcpu placement="static" current="4">4</vcpu>"#;
        let cell =
            |memory| format!(r#"<cell memAccess="shared" id="0" cpus="0-3" memory="{memory}" unit="MiB"/>"#);
        // A topology that fits stays.
        assert_eq!(resized(&document, &spec(4, 1536)).unwrap(), edited(size, &numa(&cell(1536)), ""));
        let size = r#"<memory unit="MiB">512</memory><vcpu placement="static" current="4">4</vcpu>"#;
        assert_eq!(
            resized(&document, &spec(4, 512)).unwrap(),
            edited(size, &numa(&cell(512)), ""),
            "the cell may be somebody's"
        );
    }

    #[test]
    fn a_guest_by_the_processor_has_room_for_processors_and_what_is_not_there_is_added() {
        let document = "<domain type='kvm'><vcpu>1</vcpu></domain>";
        assert_eq!(
            resized(document, &spec(1, 128)).unwrap(),
            r#"<domain type='kvm'><vcpu current="1">4</vcpu><memory unit="MiB">128</memory></domain>"#
        );
        let cpu = r#"<cpu><numa><cell id="0" cpus="0-3" memory="2048" unit="MiB"/></numa></cpu>"#;
        assert!(resized(document, &spec(1, 2048)).unwrap().contains(cpu));
    }

    #[test]
    fn what_cannot_be_read_or_divided_is_told() {
        for torn in ["", "<domain", "<domain>", "<domain><memory></domain>", "text"] {
            resized(torn, &spec(1, 128)).expect_err(torn);
        }
        let cells = "<numa><cell id='0' memory='1'/><cell id='1' memory='1'/></numa>";
        let why = resized(&edited("", cells, ""), &spec(2, 1024)).unwrap_err();
        assert!(why.contains("NUMA cells"), "{why}");
    }
}
