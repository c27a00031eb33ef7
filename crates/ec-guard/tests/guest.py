"""What a guest of the test does, with frames of its own making. usage: guest.py COMMAND ARGUMENTS…

dhcp DEVICE MAC [CHADDR]       takes an address as a client does; prints it, or "none"
release_in_fragments DEVICE MAC CHADDR IP SERVER SERVER_MAC SOURCE   the same, each part too short to tell whose it is
inform DEVICE MAC IP SERVER [GIVEN]   asks for settings as one that has its address already; prints "answered" or "none"
ask_far IP PORT                sends what passes for a renewal from port 68, and takes the answer
bpdu DEVICE MAC                says that it is the root of the spanning tree
to_bridge DEVICE MAC LAST       sends a frame that no bridge passes on, to the address of that last octet
release DEVICE MAC CHADDR IP SERVER   gives an address back
attack DEVICE MAC IP PEER_MAC PEER_IP GATEWAY   sends one frame of each kind, with its name in it
connect_tagged DEVICE MAC IP TO TO_MAC PORT   asks for a connection in frames with tags of no VLAN; prints who is answered
serve6 DEVICE IP               takes connections to port 80 of that IPv6 address
connect6 DEVICE IP             fails where port 80 there takes no connection
ping IP [SOURCE]               fails where no echo comes back
watch DEVICE                   prints the names of the frames that arrive until a second after the end of its input
"""
import re, select, socket, struct, sys, time


def mac(text):
    return bytes.fromhex(text.replace(":", ""))


def ip(text):
    return socket.inet_aton(text)


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ether(to, source, kind, payload):
    return to + source + struct.pack("!H", kind) + payload


def ip4(source, to, protocol, payload, fragment=0):
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 7, fragment, 64, protocol, 0, source, to)
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


def udp(source, to, payload):
    return struct.pack("!HHHH", source, to, 8 + len(payload), 0) + payload


def arp(operation, source_mac, source_ip, target_mac, target_ip, mark):
    return struct.pack("!HHBBH", 1, 0x800, 6, 4, operation) + source_mac + source_ip + target_mac + target_ip + mark


def ip6(source, to, following, payload):
    return struct.pack("!IHBB", 0x60000000, len(payload), following, 255) + source + to + payload


def packets(device):
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    raw.bind((device, 0))
    return raw


BROADCAST = b"\xff" * 6
ANY, ALL = ip("0.0.0.0"), ip("255.255.255.255")


def bootp(operation, xid, client, given, chaddr, options):
    head = struct.pack("!BBBBIHH4s4s4s4s", operation, 1, 6, 0, xid, 0, 0x8000, client, given, ANY, ANY)
    return head + chaddr.ljust(208 - 6, b"\0")[:16] + b"\0" * 192 + b"\x63\x82\x53\x63" + options + b"\xff"


def dhcp(device, own, chaddr=None):
    own, chaddr = mac(own), mac(chaddr or own)
    raw, xid = packets(device), int(time.time() * 1000) & 0xFFFFFFFF
    raw.settimeout(0.2)

    def ask(options):
        body = udp(68, 67, bootp(1, xid, ANY, ANY, chaddr, options))
        for _ in range(5):
            raw.send(ether(BROADCAST, own, 0x800, ip4(ANY, ALL, 17, body)))
            end = time.time() + 1
            while time.time() < end:
                try:
                    frame = raw.recv(2048)
                except socket.timeout:
                    continue
                if frame[12:14] == b"\x08\0" and frame[23] == 17 and frame[34:36] == b"\0\x43":
                    answer = frame[42:]
                    if struct.unpack("!I", answer[4:8])[0] == xid and answer[28:34] == chaddr:
                        return answer[16:20], frame[26:30]
        print("none")
        sys.exit(0)

    given, server = ask(b"\x35\1\1")
    given, _ = ask(b"\x35\1\3" + b"\x32\4" + given + b"\x36\4" + server)
    print(socket.inet_ntoa(given))


def release(device, own, chaddr, address, server):
    body = udp(68, 67, bootp(1, 99, ip(address), ANY, mac(chaddr), b"\x35\1\7" + b"\x36\4" + ip(server)))
    packets(device).send(ether(BROADCAST, mac(own), 0x800, ip4(ip(address), ip(server), 17, body)))
    packets(device).send(ether(BROADCAST, mac(own), 0x800, ip4(ANY, ALL, 17, body)))


def release_in_fragments(device, own, chaddr, address, server, server_mac, source):
    body = udp(68, 67, bootp(1, 99, ip(address), ANY, mac(chaddr), b"\x35\1\7" + b"\x36\4" + ip(server)))
    raw = packets(device)
    for part, place in [(body[:16], 0x2000), (body[16:], 2)]:
        raw.send(ether(mac(server_mac), mac(own), 0x800, ip4(ip(source), ip(server), 17, part, place)))


def ask_far(address, chaddr):
    asker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    asker.bind(("0.0.0.0", 68))
    asker.settimeout(1)
    asker.sendto(bootp(1, 99, ANY, ANY, mac(chaddr), b"\x35\1\3"), (address, 67))
    try:
        asker.recv(2048)
        print("answered")
    except socket.timeout:
        print("none")


def inform(device, own, address, server, given="0.0.0.0"):
    own, address = mac(own), ip(address)
    body = udp(68, 67, bootp(1, 77, address, ip(given), own, b"\x35\1\x08"))
    raw = packets(device)
    raw.settimeout(0.2)
    raw.send(ether(BROADCAST, own, 0x800, ip4(address, ip(server), 17, body)))
    end = time.time() + 1
    while time.time() < end:
        try:
            frame = raw.recv(2048)
        except socket.timeout:
            continue
        if frame[12:14] == b"\x08\0" and frame[23] == 17 and frame[34:38] == b"\0\x43\0\x44" and frame[46:50] == b"\0\0\0\x4d":
            print("answered")
            return
    print("none")


def bpdu(device, own):
    best = b"\0\0" + mac(own)
    body = b"\x42\x42\3" + b"\0\0\0\0\0" + best + b"\0\0\0\0" + best + b"\x80\1" + b"\0\0\x14\0\2\0\x0f\0"
    raw = packets(device)
    for _ in range(3):
        raw.send(mac("01:80:c2:00:00:00") + mac(own) + struct.pack("!H", len(body)) + body.ljust(46, b"\0"))
        time.sleep(0.1)


def to_bridge(device, source, last):
    packets(device).send(ether(mac("01:80:c2:00:00:" + last), mac(source), 0x88CC, b"\0" * 46))


def attack(device, own, address, peer_mac, peer_ip, gateway):
    own, address, peer_mac, peer_ip, gateway = mac(own), ip(address), mac(peer_mac), ip(peer_ip), ip(gateway)
    other, free, raw = mac("52:66:66:66:66:66"), ip("192.168.150.99"), packets(device)
    link = bytes.fromhex("fe800000000000000000000000000001")
    nodes = bytes.fromhex("ff020000000000000000000000000001")
    metadata = socket.inet_pton(socket.AF_INET6, "fe80::a9fe:a9fe")

    def mark(name):
        return b"MARK:" + name.encode() + b";"

    def talk(name, source_mac, source_ip, ports=(1000, 2000), fragment=0):
        raw.send(ether(peer_mac, source_mac, 0x800, ip4(source_ip, peer_ip, 17, udp(*ports, mark(name)), fragment)))

    def say_arp(name, frame_mac, sender_mac, sender_ip, operation=2):
        raw.send(ether(BROADCAST, frame_mac, 0x806, arp(operation, sender_mac, sender_ip, BROADCAST, peer_ip, mark(name))))

    def checked(message, source, to):
        # Bridges pass on nothing with options before it that is wrong.
        pseudo = source + to + struct.pack("!II", len(message), 58)
        return message[:2] + struct.pack("!H", checksum(pseudo + message)) + message[4:]

    def icmp6(name, kind, body=b"\0" * 4, before=b"", following=58, source=link, to=nodes):
        payload = before + checked(struct.pack("!BBH", kind, 0, 0) + body + mark(name), source, to)
        raw.send(ether(b"\x33\x33\0\0\0\1", own, 0x86DD, ip6(source, to, following, payload)))

    def neighbour(name, kind, about, *options):
        # Its name is in an option of the packet, since behind the message it would be one of the message itself.
        padding = mark(name).ljust(36, b"\0")
        before = b"\x3a\4" + struct.pack("!BB", 1, len(padding)) + padding
        message = struct.pack("!BBHI", kind, 0, 0, 0x20000000 if kind == 136 else 0) + about + b"".join(options)
        payload = before + checked(message, link, nodes)
        raw.send(ether(b"\x33\x33\0\0\0\1", own, 0x86DD, ip6(link, nodes, 0, payload)))

    def in_parts(name, kind, about):
        # The first part ends before any option. Hosts that filter what their bridges pass on put it together first.
        padding = mark(name).ljust(36, b"\0")
        before = b"\x2c\4" + struct.pack("!BB", 1, len(padding)) + padding
        message = checked(struct.pack("!BBHI", kind, 0, 0, 0) + about + b"\1\1" + other, link, nodes)
        first = len(message) - 8
        for place, part in ((1, message[:first]), (first, message[first:])):
            payload = before + struct.pack("!BBHI", 58, 0, place, kind) + part
            raw.send(ether(b"\x33\x33\0\0\0\1", own, 0x86DD, ip6(link, nodes, 0, payload)))

    def wrapped(name, tags, inner_kind, inner):
        raw.send(peer_mac + own + tags + struct.pack("!H", inner_kind) + inner + mark(name))

    # What a guest may do.
    talk("ok-udp", own, address)
    say_arp("ok-arp", own, own, address, 1)
    say_arp("ok-arp-probe", own, own, ANY, 1)
    nonce = b"\x0e\1\1\2\3\4\5\6"
    neighbour("ok-ns", 135, link, b"\1\1" + own)
    # As whoever looks whether an address is free, and whoever asks with both.
    neighbour("ok-ns-nonce", 135, link, nonce)
    neighbour("ok-ns-both", 135, link, b"\1\1" + own, nonce)
    neighbour("ok-na", 136, link, b"\2\1" + own)
    neighbour("ok-na-bare", 136, link)
    neighbour("ok-rs", 133, b"", b"\1\1" + own)
    neighbour("ok-rs-bare", 133, b"")
    neighbour("ok-rs-nonce", 133, b"", nonce)
    raw.send(ether(BROADCAST, own, 0x8035, mark("ok-rarp")))
    # Another's hardware address.
    talk("mac-of-another", other, address)
    # Another's IP address.
    talk("ip-of-peer", own, peer_ip)
    talk("ip-free", own, free)
    talk("ip-of-gateway", own, gateway)
    talk("ip-none", own, ANY)
    talk("ip-fragment", own, free, fragment=0x2000)
    talk("ip-later-fragment", own, free, fragment=3)
    # ARP.
    say_arp("arp-ip-of-gateway", own, own, gateway)
    say_arp("arp-ip-free", own, own, free, 1)
    say_arp("arp-mac-of-another", own, other, address)
    say_arp("arp-mac-of-another-probe", own, other, ANY, 1)
    # Servers that only the host is.
    talk("dhcp-server", own, address, (67, 68))
    # A client looks at whereto an answer is sent, and not at where from.
    talk("dhcp-server-of-another-port", own, address, (1067, 68))
    raw.send(ether(BROADCAST, own, 0x86DD, ip6(link, nodes, 17, udp(1547, 546, mark("dhcp6-server-of-another-port")))))
    raw.send(ether(BROADCAST, own, 0x86DD, ip6(link, nodes, 17, udp(547, 546, mark("dhcp6-server")))))
    # Neighbour discovery.
    icmp6("router-advert", 134, b"\0" * 12)
    icmp6("router-advert-behind-options", 134, b"\0" * 12, before=b"\x3a\0" + b"\1\4\0\0\0\0", following=0)
    icmp6("redirect", 137, b"\0" * 36)
    neighbour("advert-of-another", 136, link, b"\2\1" + other)
    neighbour("solicit-of-another", 135, link, b"\1\1" + other)
    neighbour("advert-of-another-second", 136, link, nonce, b"\2\1" + other)
    neighbour("solicit-of-another-second", 135, link, b"\1\1" + own, b"\1\1" + other)
    neighbour("advert-of-another-third", 136, link, nonce, nonce, b"\2\1" + other)
    neighbour("advert-of-another-longer", 136, link, b"\x0e\2" + b"\0" * 14, b"\2\1" + other)
    neighbour("advert-of-another-unknown", 136, link, b"\xfd\1" + b"\0" * 6, b"\2\1" + other)
    neighbour("router-asked-by-another", 133, b"", b"\1\1" + other)
    neighbour("router-asked-by-another-second", 133, b"", b"\1\1" + own, b"\1\1" + other)
    neighbour("router-asked-by-another-nonce", 133, b"", nonce, b"\1\1" + other)
    neighbour("router-asked-by-another-longer", 133, b"", b"\x0e\2" + b"\0" * 14, b"\1\1" + other)
    in_parts("advert-in-parts", 136, link)
    in_parts("solicit-in-parts", 135, link)
    in_parts("router-asked-in-parts", 133, b"")
    # The metadata service, as guests ask it by IPv6.
    neighbour("advert-of-metadata", 136, metadata, b"\2\1" + own)
    neighbour("solicit-of-metadata", 135, metadata)
    icmp6("ip6-of-metadata", 128, source=metadata)
    icmp6("ip6-to-metadata", 128, to=metadata)
    # Wrapped: the inner packet is another's.
    inner = ip4(free, peer_ip, 17, udp(1, 2, mark("vlan")))
    wrapped("vlan", b"\x81\0\0\5", 0x800, inner)
    wrapped("vlan-0", b"\x81\0\0\0", 0x800, inner.replace(b"vlan;", b"vlan0"))
    wrapped("qinq", b"\x88\xa8\0\5\x81\0\0\6", 0x800, inner)
    wrapped("snap", struct.pack("!H", 60) + b"\xaa\xaa\3\0\0\0", 0x800, inner)
    wrapped("ethertype", b"", 0x88B5, b"")
    # Last: without rules, the bridge takes us for the peer from here on.
    talk("mac-of-peer", peer_mac, peer_ip)


def connect_tagged(device, own, address, to, to_mac, port):
    own, address, to, to_mac, raw, answered = mac(own), ip(address), ip(to), mac(to_mac), packets(device), []
    for tags in (0, 1, 2, 3):
        port_of_ours = 3000 + tags
        def tcp(check):
            return struct.pack("!HHIIBBHHH", port_of_ours, int(port), 7, 0, 0x50, 2, 1024, check, 0)
        pseudo = address + to + struct.pack("!BBH", 0, 6, 20)
        packet = ip4(address, to, 6, tcp(checksum(pseudo + tcp(0))))
        raw.send(to_mac + own + b"\x81\0\0\0" * tags + struct.pack("!H", 0x800) + packet)
        raw.settimeout(0.1)
        end = time.time() + 0.7
        while time.time() < end:
            try:
                frame = raw.recv(2048)
            except socket.timeout:
                continue
            ports = struct.pack("!HH", int(port), port_of_ours)
            if frame[12:14] == b"\x08\0" and frame[23] == 6 and frame[34:38] == ports and frame[47] == 0x12:
                answered.append(str(tags))
                break
    print(" ".join(answered))


def serve6(device, address):
    server = socket.socket(socket.AF_INET6)
    # Before the interface has that address.
    server.setsockopt(socket.IPPROTO_IPV6, 78, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, 80, 0, socket.if_nametoindex(device)))
    server.listen()
    print("ready", flush=True)
    while True:
        server.accept()[0].close()


def connect6(device, address):
    asker = socket.socket(socket.AF_INET6)
    asker.settimeout(1)
    asker.connect((address, 80, 0, socket.if_nametoindex(device)))


def ping(to, source="0.0.0.0"):
    echo = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    echo.bind((source, 0))
    echo.settimeout(0.5)
    for number in range(3):
        head = struct.pack("!BBHHH", 8, 0, 0, 0xECEC, number)
        echo.sendto(head[:2] + struct.pack("!H", checksum(head)) + head[4:], (to, 0))
        try:
            while echo.recv(2048)[20:26] != b"\0\0" + struct.pack("!H", checksum(struct.pack("!BBHHH", 0, 0, 0, 0xECEC, number))) + b"\xec\xec":
                pass
            return
        except socket.timeout:
            pass
    sys.exit(1)


def watch(device):
    raw, seen, end = packets(device), set(), None
    raw.settimeout(0.1)
    print("watching", flush=True)
    while end is None or time.time() < end:
        if end is None and select.select([sys.stdin], [], [], 0)[0]:
            end = time.time() + 1
        try:
            frame = raw.recv(2048)
        except socket.timeout:
            continue
        for name in re.findall(rb"MARK:([a-z0-9-]+);", frame):
            seen.add(name.decode())
    print("\n".join(sorted(seen)))


globals()[sys.argv[1]](*sys.argv[2:])
