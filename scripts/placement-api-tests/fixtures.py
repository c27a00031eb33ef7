"""What the fixtures named in the gabbi files stand for, and how to bring it about over HTTP.

A fixture decides three things: how the server is configured, which environment variables the file's tests
may read, and which providers and allocations exist when its first test runs. The data end with the same
generations that they have in OpenStack's own runs: one more for each inventory, for a set of traits and for
an allocation, none for aggregates.
"""

import http.client
import json
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

Profile = Literal["legacy", "secure", "open"]

# What an inventory has: its total, or its total with other properties. The largest unit is the total.
Stock = int | dict[str, int | float]


@dataclass(frozen=True)
class Provider:
    """A resource provider. A name that starts with "$" is a variable's; aggregates are always variables."""

    name: str
    inventory: dict[str, Stock] = field(default_factory=dict)
    traits: tuple[str, ...] = ()
    aggregates: tuple[str, ...] = ()
    parent: str | None = None
    variable: str | None = None
    """Which variable tells its UUID: that of its name, if not given."""

    def uuid_variable(self) -> str:
        """The environment variable which tells its UUID."""
        return self.variable or f"{self.name.upper()}_UUID"


@dataclass(frozen=True)
class Consumer:
    """Allocations from one provider. A user or project that starts with "$" is a variable's."""

    provider: str
    used: dict[str, int]
    user: str
    project: str
    variable: str | None = None
    """Which variable tells its UUID, if any."""


@dataclass(frozen=True)
class Fixture:
    """How a server is to be configured, and what is to be in it."""

    profile: Profile = "legacy"
    cors_origins: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    """Variables with UUIDs, besides those of every fixture and those of the data."""
    providers: tuple[Provider, ...] = ()
    consumers: tuple[Consumer, ...] = ()


SHARING = "MISC_SHARES_VIA_AGGREGATE"


def _allocations() -> Fixture:
    """One provider with three consumers, the last of which is another user's."""
    disk: Stock = {"total": 2048, "step_size": 10, "min_unit": 10, "max_unit": 1000}
    return Fixture(
        variables=("ALT_USER_ID", "ALT_RP_UUID", "ALT_RP_NAME"),
        providers=(Provider("$RP_NAME", {"DISK_GB": disk, "VCPU": 10}, variable="RP_UUID"),),
        consumers=(
            Consumer("$RP_NAME", {"DISK_GB": 1000}, "$USER_ID", "$PROJECT_ID", "CONSUMER_0"),
            Consumer("$RP_NAME", {"VCPU": 6}, "$USER_ID", "$PROJECT_ID", "CONSUMER_ID"),
            Consumer(
                "$RP_NAME", {"DISK_GB": 20, "VCPU": 1}, "$ALT_USER_ID", "$PROJECT_ID", "ALT_CONSUMER_ID"
            ),
        ),
    )


def _shared_storage() -> Fixture:
    """Two nodes with two NUMA cells each and a network card's function in each cell; two shared disks."""
    cpu_and_memory: dict[str, Stock] = {
        "VCPU": {"total": 24, "allocation_ratio": 16.0},
        "MEMORY_MB": {"total": 128 * 1024, "allocation_ratio": 1.5},
    }
    disk: dict[str, Stock] = {"DISK_GB": {"total": 2000, "reserved": 100}}
    aggregates = ("AGG_UUID",)
    cells = ("1_1", "1_2", "2_1", "2_2")
    return Fixture(
        providers=(
            Provider("cn1", cpu_and_memory, ("HW_CPU_X86_SSE", "HW_CPU_X86_SSE2"), aggregates),
            Provider("cn2", cpu_and_memory | disk, (), aggregates),
            Provider("ss", disk, (SHARING,), aggregates),
            Provider("ss2", disk, (SHARING,), aggregates),
            *(Provider(f"numa{cell}", parent=f"cn{cell[0]}") for cell in cells),
            *(Provider(f"pf{cell}", {"SRIOV_NET_VF": 8}, parent=f"numa{cell}") for cell in cells),
        ),
    )


def _non_shared_storage() -> Fixture:
    """Three nodes with disks of their own, and aggregates that nobody is in yet."""
    inventory: dict[str, Stock] = {"VCPU": 24, "MEMORY_MB": 128 * 1024, "DISK_GB": 2000}
    return Fixture(
        variables=("AGGA_UUID", "AGGB_UUID", "AGGC_UUID"),
        providers=tuple(Provider(f"cn{n}", inventory) for n in (1, 2, 3)),
    )


def _numa_aggregate() -> Fixture:
    """Two nodes, resources in their NUMA cells only; a disk shared with both, another with one cell."""
    cpu: dict[str, Stock] = {"VCPU": {"total": 24, "allocation_ratio": 16.0}}
    disk: dict[str, Stock] = {"DISK_GB": {"total": 2000, "reserved": 100}}
    return Fixture(
        providers=(
            Provider("cn1", aggregates=("AGGA_UUID",)),
            Provider("cn2", aggregates=("AGGA_UUID", "AGGB_UUID")),
            Provider("ss1", disk, (SHARING,), ("AGGA_UUID",)),
            Provider("ss2", disk, (SHARING,), ("AGGC_UUID",)),
            Provider("numa1_1", cpu, aggregates=("AGGC_UUID",), parent="cn1"),
            Provider("numa1_2", cpu, parent="cn1"),
            Provider("numa2_1", cpu, parent="cn2"),
            Provider("numa2_2", cpu, parent="cn2"),
        ),
    )


def _numa_network(deep: bool) -> Fixture:
    """A node with NUMA cells, accelerators and network agents, and one with network cards; a shared disk.

    If `deep`, the nodes are not roots but have parents, which have one parent.
    """
    aggregates = ("AGGA_UUID",)
    egress = "NET_BW_EGR_KILOBIT_PER_SEC"
    # Which physical network each card's functions are on, and how many there are.
    cards = {1: ((1, 2), 4), 2: ((1, 2, 1, 2), 2), 3: ((1,), 8)}
    above = (Provider("gp1"), Provider("p1", parent="gp1"), Provider("p2", parent="gp1"))
    return Fixture(
        providers=(
            *(above if deep else ()),
            Provider("ss1", {"DISK_GB": 2000}, (SHARING,), aggregates),
            Provider("cn1", {}, ("COMPUTE_VOLUME_MULTI_ATTACH",), aggregates, "p1" if deep else None),
            Provider(
                "numa0",
                {"VCPU": 4, "MEMORY_MB": {"total": 2048, "min_unit": 512, "step_size": 256}},
                ("HW_NUMA_ROOT",),
                parent="cn1",
            ),
            Provider(
                "numa1",
                {"VCPU": 4, "MEMORY_MB": {"total": 2048, "min_unit": 256, "max_unit": 1024}},
                ("HW_NUMA_ROOT", "CUSTOM_FOO"),
                parent="cn1",
            ),
            Provider("fpga0", {"FPGA": 1}, parent="numa0"),
            Provider("pgpu0", {"VGPU": 8}, parent="numa0"),
            Provider("fpga1_0", {"FPGA": 1}, parent="numa1"),
            Provider("fpga1_1", {"FPGA": 1}, parent="numa1"),
            Provider("sriov_agent", {}, ("CUSTOM_VNIC_TYPE_DIRECT",), parent="cn1"),
            Provider("esn1", {egress: 10000}, ("CUSTOM_PHYSNET1",), parent="sriov_agent"),
            Provider("esn2", {egress: 20000}, ("CUSTOM_PHYSNET2",), parent="sriov_agent"),
            Provider("ovs_agent", {}, ("CUSTOM_VNIC_TYPE_NORMAL",), parent="cn1"),
            Provider("br_int", {egress: 1000}, ("CUSTOM_PHYSNET0",), parent="ovs_agent"),
            Provider(
                "cn2",
                {
                    "VCPU": 8,
                    "MEMORY_MB": {"total": 2048, "min_unit": 1024, "step_size": 128},
                    "DISK_GB": 1000,
                },
                ("CUSTOM_FOO",),
                aggregates,
                "p2" if deep else None,
            ),
            *(Provider(f"nic{card}", {}, ("CUSTOM_HW_NIC_ROOT",), parent="cn2") for card in cards),
            *(
                Provider(
                    f"pf{card}_{number}",
                    {"CUSTOM_VF": functions},
                    (f"CUSTOM_PHYSNET{network}",),
                    parent=f"nic{card}",
                )
                for card, (networks, functions) in cards.items()
                for number, network in enumerate(networks, 1)
            ),
        ),
        consumers=(
            Consumer("numa0", {"VCPU": 2}, "numafx-user", "numafx-project"),
            Consumer("cn2", {"VCPU": 3}, "numafx-user", "numafx-project"),
        ),
    )


def _granular() -> Fixture:
    """Three nodes; disks and a network that two aggregates and one aggregate share with some of them."""
    common: dict[str, Stock] = {"VCPU": 8, "MEMORY_MB": 4096}
    network: dict[str, Stock] = {"SRIOV_NET_VF": 8, "CUSTOM_NET_MBPS": 4000}

    def provider(
        name: str, inventory: dict[str, Stock], traits: tuple[str, ...], aggregates: tuple[str, ...]
    ) -> Provider:
        return Provider(name, inventory, traits, aggregates, variable=name.upper())

    return Fixture(
        providers=(
            provider(
                "cn_left",
                common | {"DISK_GB": 500, "VGPU": 8} | network,
                ("HW_CPU_X86_AVX", "HW_CPU_X86_AVX2", "HW_GPU_API_DXVA", "HW_NIC_DCB_PFC", "CUSTOM_FOO"),
                ("AGGA",),
            ),
            provider(
                "cn_middle",
                common | network,
                ("HW_CPU_X86_AVX", "HW_CPU_X86_AVX2", "HW_CPU_X86_SSE", "HW_NIC_ACCEL_TLS"),
                ("AGGA", "AGGB"),
            ),
            provider(
                "cn_right",
                common | {"DISK_GB": 500, "VGPU": {"total": 8, "max_unit": 2}},
                ("HW_CPU_X86_MMX", "HW_GPU_API_DXVA", "CUSTOM_DISK_SSD"),
                ("AGGB", "AGGC"),
            ),
            provider("shr_disk_1", {"DISK_GB": 1000}, (SHARING, "CUSTOM_DISK_SSD"), ("AGGA",)),
            provider("shr_disk_2", {"DISK_GB": 1000}, (SHARING,), ("AGGA", "AGGB")),
            provider("shr_net", {"SRIOV_NET_VF": 16, "CUSTOM_NET_MBPS": 40000}, (SHARING,), ("AGGC",)),
        ),
    )


def _network_segments() -> Fixture:
    """Four nodes with Neutron's two agents and their devices, on none, one or both segments of a network."""
    direct = ("CUSTOM_VNIC_TYPE_DIRECT", "CUSTOM_VNIC_TYPE_DIRECT_PHYSICAL", "CUSTOM_VNIC_TYPE_MACVTAP")
    normal = ("CUSTOM_VNIC_TYPE_NORMAL",)
    # For each node its networks, and the bandwidth of a bridge and of a card.
    nodes = (
        (("OTHER",), 5000, 10000),
        (("MSN_S1",), 5000, 10000),
        (("MSN_S2",), 5000, 10000),
        (("MSN_S1", "MSN_S2"), 1000, 1000),
    )
    providers = []
    for index, (networks, of_bridge, of_card) in enumerate(nodes):
        node = f"compute{index}"

        def device(
            name: str, variable: str, parent: str, bandwidth: int, traits: tuple[str, ...]
        ) -> Provider:
            inventory: dict[str, Stock] = {
                f"NET_BW_{direction}_KILOBIT_PER_SEC": bandwidth for direction in ("EGR", "IGR")
            }
            return Provider(f"{parent}:{name}", inventory, traits, parent=parent, variable=variable)

        bridges, cards = f"{node}:Open vSwitch agent", f"{node}:NIC Switch agent"
        inventory: dict[str, Stock] = {"VCPU": 8, "MEMORY_MB": 4096, "DISK_GB": 500}
        rate: dict[str, Stock] = {"NET_PACKET_RATE_KILOPACKET_PER_SEC": 1000}
        providers += [
            Provider(node, inventory, variable=node),
            Provider(bridges, rate, normal, parent=node, variable=f"{node}:ovs_agent"),
            Provider(cards, {}, direct, parent=node, variable=f"{node}:sriov_agent"),
        ]
        for number, network in enumerate(networks):
            trait = f"CUSTOM_PHYSNET_{network}"
            suffix = str(number + 1) if number else ""
            variable = f"{node}:br_ex{suffix}"
            providers += [
                device(f"br-ex{suffix}", variable, bridges, of_bridge, (*normal, trait)),
                device(f"enp129s0f{number}", f"{node}:pf{number}", cards, of_card, (*direct, trait)),
            ]
    return Fixture(providers=tuple(providers))


# By the names that the gabbi files use.
FIXTURES = {
    "APIFixture": Fixture(),
    "LegacyRBACPolicyFixture": Fixture(profile="legacy"),
    "SecureRBACPolicyFixture": Fixture(profile="secure"),
    "OpenPolicyFixture": Fixture(profile="open"),
    "CORSFixture": Fixture(cors_origins=("http://valid.example.com",)),
    "AllocationFixture": _allocations(),
    "SharedStorageFixture": _shared_storage(),
    "NonSharedStorageFixture": _non_shared_storage(),
    "NUMAAggregateFixture": _numa_aggregate(),
    "NUMANetworkFixture": _numa_network(deep=False),
    "DeepNUMANetworkFixture": _numa_network(deep=True),
    "GranularFixture": _granular(),
    "NeutronQoSMultiSegmentFixture": _network_segments(),
}

# Variables that every file may read: these hold a UUID each, even where they are used as names.
UUID_VARIABLES = (
    *(f"RP_{what}{number}" for number in ("", "1", "2") for what in ("UUID", "NAME")),
    *("PROJECT_ID", "ADMIN_PROJECT_ID", "SERVICE_PROJECT_ID", "PROJECT_ID_ALT", "USER_ID", "USER_ID_ALT"),
    *("INSTANCE_UUID", "MIGRATION_UUID", "CONSUMER_UUID", "PARENT_PROVIDER_UUID", "ALT_PARENT_PROVIDER_UUID"),
)


class FixtureError(Exception):
    """The server did not accept a fixture's data."""


def prepare(fixture: Fixture, port: int) -> dict[str, str]:
    """Writes the fixture's data to the empty server at `port` of this host.

    Returns the environment variables for the tests.
    """
    variables = {name: str(uuid.uuid4()) for name in (*UUID_VARIABLES, *fixture.variables)}
    for number in ("", "1", "2"):
        variables[f"CUSTOM_RES_CLASS{number}"] = f"CUSTOM_IRON_NFV{number}"
    Builder(port, variables).build(fixture)
    return variables


class Builder:
    """Writes providers and allocations over HTTP, and notes their UUIDs as variables."""

    def __init__(self, port: int, variables: dict[str, str]) -> None:
        self._port = port
        self._variables = variables
        self._uuids: dict[str, str] = {}

    def build(self, fixture: Fixture) -> None:
        """Writes all that the fixture has."""
        classes = {name for provider in fixture.providers for name in provider.inventory}
        traits = {name for provider in fixture.providers for name in provider.traits}
        for kind, names in (("resource_classes", classes), ("traits", traits)):
            for name in sorted(names):
                if name.startswith("CUSTOM_"):
                    self._call("PUT", f"/{kind}/{name}", "1.7")
        for provider in fixture.providers:
            self._provider(provider)
        for consumer in fixture.consumers:
            self._consumer(consumer)

    def _provider(self, provider: Provider) -> None:
        identity = self._uuid(provider.uuid_variable())
        self._uuids[provider.name] = identity
        path = f"/resource_providers/{identity}"
        description = {"name": self._value(provider.name), "uuid": identity}
        if provider.parent is not None:
            description["parent_provider_uuid"] = self._uuids[provider.parent]
        generation = self._call("POST", "/resource_providers", "1.20", description)["generation"]
        if provider.aggregates:
            # This version does not change the generation.
            self._call("PUT", f"{path}/aggregates", "1.1", [self._uuid(name) for name in provider.aggregates])
        for resource_class, stock in provider.inventory.items():
            inventory = {"total": stock} if isinstance(stock, int) else stock
            new = {"resource_class": resource_class, "max_unit": inventory["total"], **inventory}
            answer = self._call("POST", f"{path}/inventories", "1.20", new)
            generation = answer["resource_provider_generation"]
        if provider.traits:
            traits = {"resource_provider_generation": generation, "traits": list(provider.traits)}
            self._call("PUT", f"{path}/traits", "1.20", traits)

    def _consumer(self, consumer: Consumer) -> None:
        identity = self._uuid(consumer.variable) if consumer.variable else str(uuid.uuid4())
        # The newest version where a consumer has no type.
        self._call(
            "PUT",
            f"/allocations/{identity}",
            "1.37",
            {
                "allocations": {self._uuids[consumer.provider]: {"resources": consumer.used}},
                "consumer_generation": None,
                "project_id": self._value(consumer.project),
                "user_id": self._value(consumer.user),
            },
        )

    def _uuid(self, variable: str) -> str:
        """The value of a variable, which gets one if it has none yet."""
        return self._variables.setdefault(variable, str(uuid.uuid4()))

    def _value(self, name: str) -> str:
        """The value of a variable for its name after "$", else what is given."""
        return self._variables[name[1:]] if name.startswith("$") else name

    def _call(self, method: str, path: str, version: str, body: Any = None) -> Any:
        """Sends a request as an administrator; returns what the answer's JSON says, None if it is empty."""
        headers = {"X-Auth-Token": "admin", "OpenStack-API-Version": f"placement {version}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            answer = response.read()
        except OSError as error:
            raise FixtureError(f"{method} {path}: {error}") from error
        finally:
            connection.close()
        if response.status >= 300:
            raise FixtureError(f"{method} {path}: {response.status} {answer.decode(errors='replace')}")
        return json.loads(answer) if answer else None
