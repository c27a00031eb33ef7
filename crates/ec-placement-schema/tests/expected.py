"""Writes down what OpenStack's server says to many documents, right and wrong ones.

To be run with a Python that has openstack-placement installed:

    python expected.py expected.json        # a choice of about 190 kB, to be committed
    python expected.py wide.json 150        # 150 documents per schema, for a thorough comparison

The documents are made up from the schemas, with a fixed seed, and then spoilt.
"""

import copy
import json
import random
import sys

import jsonschema
from placement import util
from placement.schemas import aggregate, allocation, allocation_candidate, inventory
from placement.schemas import reshaper, resource_class, resource_provider, trait, usage

SIZE = 180_000
# What is quoted of a document is cut at 2,000 characters: such documents are left out here.
QUOTED = 1_900
UUIDS = [
    "4e05a85b-e8a6-4b3a-82c1-5f6ad3f71d55",
    "4e05a85be8a64b3a82c15f6ad3f71d55",
    "4E05A85B-E8A6-4B3A-82C1-5F6AD3F71D55",
    "{4e05a85b-e8a6-4b3a-82c1-5f6ad3f71d55}",
    "urn:uuid:4e05a85b-e8a6-4b3a-82c1-5f6ad3f71d55",
    "4e05a85b-e8a6-4b3a-82c1-5f6ad3f71d55-",
    "4e05a85b-e8a6-4b3a-82c1-5f6ad3f71d5g",
    "4e05a85b-e8a6-4b3a-82c1-5f6ad3f71d5",
    "------------------------------------",
]
KEYS = UUIDS[:1] + UUIDS[6:] + [
    "VCPU", "MEMORY_MB", "CUSTOM_GPU_8", "vcpu", "VCPU\n", "a b", "", "it's", 'say "it\'s"', "\u00e9\u0301",
    "name", "uuid", "total", "extra", "allocations", "generation", "_COMPUTE", "@", "resources01",
    "resources1", "resources_A", "resources1@", "required2", "in_tree7", "member_of_" + "x" * 64,
]
TEXTS = UUIDS + KEYS + [
    "x" * 200, "x" * 201, "x" * 256, "CUSTOM_" + "Y" * 300, "words " * 20, "many\nlines\r\nof text " * 6,
    "tab\tback\\slash", "\u00a0\u200b\u2028\ue000\U0010ffff\U0001f600", "\u65e5\u672c\u8a9e " * 30,
    "all", "allure", "unknown", "unknowns", "none", "isolate", "0", "7", "-1", "12\n",
]
NUMBERS = [
    0, 1, -1, 7, 2147483647, 2147483648, -2147483649, 2**63, 2**64 - 1, 10**30, -(10**30), 1.0, 2.5, 0.0,
    -0.5, 1e-7, 1e15, 1e16, 1e39, 3.5e38, 0.1, 16.0,
]
SCHEMAS = [
    ("ResourceProviderCreate", 0, resource_provider.POST_RESOURCE_PROVIDER_SCHEMA),
    ("ResourceProviderCreate", 14, resource_provider.POST_RP_SCHEMA_V1_14),
    ("ResourceProviderUpdate", 0, resource_provider.PUT_RESOURCE_PROVIDER_SCHEMA),
    ("ResourceProviderUpdate", 14, resource_provider.PUT_RP_SCHEMA_V1_14),
    ("ResourceClassCreate", 2, resource_class.POST_RC_SCHEMA_V1_2),
    ("InventoryPost", 0, inventory.POST_INVENTORY_SCHEMA),
    ("InventoryPut", 0, inventory.BASE_INVENTORY_SCHEMA),
    ("InventoriesPut", 0, inventory.PUT_INVENTORY_SCHEMA),
    ("Aggregates", 1, aggregate.PUT_AGGREGATES_SCHEMA_V1_1),
    ("Aggregates", 19, aggregate.PUT_AGGREGATES_SCHEMA_V1_19),
    ("ProviderTraits", 6, trait.SET_TRAITS_FOR_RP_SCHEMA),
    ("AllocationsPut", 0, allocation.ALLOCATION_SCHEMA),
    ("AllocationsPut", 8, allocation.ALLOCATION_SCHEMA_V1_8),
    ("AllocationsPut", 12, allocation.ALLOCATION_SCHEMA_V1_12),
    ("AllocationsPut", 28, allocation.ALLOCATION_SCHEMA_V1_28),
    ("AllocationsPut", 34, allocation.ALLOCATION_SCHEMA_V1_34),
    ("AllocationsPut", 38, allocation.ALLOCATION_SCHEMA_V1_38),
    ("AllocationsPost", 13, allocation.POST_ALLOCATIONS_V1_13),
    ("AllocationsPost", 28, allocation.POST_ALLOCATIONS_V1_28),
    ("AllocationsPost", 34, allocation.POST_ALLOCATIONS_V1_34),
    ("AllocationsPost", 38, allocation.POST_ALLOCATIONS_V1_38),
    ("Reshaper", 30, reshaper.POST_RESHAPER_SCHEMA),
    ("Reshaper", 34, reshaper.POST_RESHAPER_SCHEMA_V1_34),
    ("Reshaper", 38, reshaper.POST_RESHAPER_SCHEMA_V1_38),
    ("ResourceProviders", 0, resource_provider.GET_RPS_SCHEMA_1_0),
    ("ResourceProviders", 3, resource_provider.GET_RPS_SCHEMA_1_3),
    ("ResourceProviders", 4, resource_provider.GET_RPS_SCHEMA_1_4),
    ("ResourceProviders", 14, resource_provider.GET_RPS_SCHEMA_1_14),
    ("ResourceProviders", 18, resource_provider.GET_RPS_SCHEMA_1_18),
    ("AllocationCandidates", 10, allocation_candidate.GET_SCHEMA_1_10),
    ("AllocationCandidates", 16, allocation_candidate.GET_SCHEMA_1_16),
    ("AllocationCandidates", 17, allocation_candidate.GET_SCHEMA_1_17),
    ("AllocationCandidates", 21, allocation_candidate.GET_SCHEMA_1_21),
    ("AllocationCandidates", 25, allocation_candidate.GET_SCHEMA_1_25),
    ("AllocationCandidates", 31, allocation_candidate.GET_SCHEMA_1_31),
    ("AllocationCandidates", 33, allocation_candidate.GET_SCHEMA_1_33),
    ("AllocationCandidates", 35, allocation_candidate.GET_SCHEMA_1_35),
    ("AllocationCandidates", 36, allocation_candidate.GET_SCHEMA_1_36),
    ("Traits", 6, trait.LIST_TRAIT_SCHEMA),
    ("Usages", 9, usage.GET_USAGES_SCHEMA_1_9),
    ("Usages", 38, usage.GET_USAGES_SCHEMA_V1_38),
]
QUERIES = {"ResourceProviders", "AllocationCandidates", "Traits", "Usages"}


def junk(rng, depth=0):
    kind = rng.randrange(8 if depth < 2 else 6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice([None, True, False])
    if kind == 5:
        return rng.choice([[], {}])
    if kind == 6:
        return [junk(rng, depth + 1) for _ in range(rng.randrange(1, 8))]
    return {rng.choice(KEYS): junk(rng, depth + 1) for _ in range(rng.randrange(1, 8))}


def sound(rng, schema):
    """A document that is mostly right."""
    if "anyOf" in schema:
        return sound(rng, rng.choice(schema["anyOf"]))
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind == "object":
        result = {}
        for name, sub in schema.get("properties", {}).items():
            if name in schema.get("required", []) or rng.random() < 0.6:
                result[name] = sound(rng, sub)
        for pattern, sub in schema.get("patternProperties", {}).items():
            for _ in range(rng.randrange(1, 3)):
                if "a-fA-F" in pattern:
                    key = "%08x-bb29-4d1a-8d1d-0d0b2a1f0d3c" % rng.randrange(2**32)
                elif pattern == "^[A-Z0-9_]+$":
                    key = rng.choice(["VCPU", "MEMORY_MB", "DISK_GB", "CUSTOM_GPU_8"])
                elif pattern.startswith("["):
                    key = rng.choice(["_COMPUTE", "1", "_NET-a"])
                else:
                    key = pattern[1:].split("(")[0] + rng.choice(["", "1", "22"])
                result[key] = sound(rng, sub)
        return result
    if kind == "array":
        return [sound(rng, schema["items"]) for _ in range(rng.randrange(1, 4))]
    if kind == "integer":
        return max(schema.get("minimum", 0), rng.choice([1, 2, 8, 1024, 2.0]))
    if kind == "number":
        return rng.choice([1.0, 16, 1.5])
    if kind == "null":
        return None
    if schema.get("format") == "uuid":
        return "%08x-bb29-4d1a-8d1d-0d0b2a1f0d3c" % rng.randrange(2**32)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "CUSTOM" in schema.get("pattern", "") or "A-Z" in schema.get("pattern", ""):
        return rng.choice(["CUSTOM_GOLD", "CUSTOM_A_1"])
    if "1-9" in schema.get("pattern", ""):
        return "10"
    return rng.choice(["some text", "HW_CPU_X86_AVX2", "it's"])


def places(document, trail=()):
    yield trail
    if isinstance(document, dict):
        for key in document:
            yield from places(document[key], trail + (key,))
    elif isinstance(document, list):
        for index in range(len(document)):
            yield from places(document[index], trail + (index,))


def spoil(rng, document):
    trail = rng.choice(list(places(document)))
    if not trail:
        if rng.random() < 0.5 and isinstance(document, dict):
            document[rng.choice(KEYS)] = junk(rng)
            return document
        return junk(rng) if rng.random() < 0.3 else document
    holder = document
    for step in trail[:-1]:
        holder = holder[step]
    value = holder[trail[-1]]
    how = rng.randrange(5)
    if how == 0:
        del holder[trail[-1]]
    elif how == 1 and isinstance(value, dict):
        value[rng.choice(KEYS)] = junk(rng)
    elif how == 2 and isinstance(value, list) and value:
        value.append(copy.deepcopy(rng.choice(value)))
    elif how == 3 and isinstance(value, (list, dict)):
        value.clear()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        holder[trail[-1]] = rng.choice(NUMBERS) if rng.random() < 0.8 else junk(rng)
    elif isinstance(value, str) and rng.random() < 0.7:
        holder[trail[-1]] = rng.choice(TEXTS)
    else:
        holder[trail[-1]] = junk(rng)
    return document


def query(rng, document):
    """The document as pairs of texts, some of them twice."""
    if not isinstance(document, dict):
        document = {}
    pairs = []
    for name, value in document.items():
        pairs.append([name, value if isinstance(value, str) else rng.choice(TEXTS + [str(value)[:60]])])
        if rng.random() < 0.1:
            pairs.append([name, rng.choice(TEXTS)])
    rng.shuffle(pairs)
    return pairs


def has_great(value, kind):
    """Whether there is such a number beyond 64 bits: serde_json does not tell integers from floats there."""
    if isinstance(value, (list, dict)):
        return any(has_great(each, kind) for each in (value if isinstance(value, list) else value.values()))
    return isinstance(value, kind) and abs(value) >= 2**64


def answer(name, schema, document):
    if name in QUERIES:
        document, checker = dict(document), jsonschema.FormatChecker()
    else:
        checker = util._FORMAT_CHECKER
    try:
        jsonschema.validate(document, schema, format_checker=checker)
    except jsonschema.ValidationError as error:
        if len(repr(error.instance)) >= QUOTED or len(error.message) >= QUOTED:
            return False
        of_number = error.schema.get("type") == "number" and isinstance(error.instance, (int, float))
        if has_great(error.instance, int if of_number else float):
            return False
        return error
    return None


def main(path, per_schema=0):
    rng = random.Random(1)
    schemas, cases, seen = {}, [], set()
    used = 0
    rounds = per_schema or 40
    for _ in range(rounds):
        for (name, since, schema), (after, until, _) in zip(SCHEMAS, SCHEMAS[1:] + [(None, 0, None)]):
            # Any microversion of those that the schema holds for.
            minor = rng.randrange(since, until if after == name else 40)
            document = sound(rng, schema)
            for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 2, 3])):
                document = spoil(rng, document)
            if name in QUERIES:
                document = query(rng, document)
            # Objects are sorted, as serde_json has them.
            document = json.loads(json.dumps(document, sort_keys=True))
            error = answer(name, schema, document)
            if error is False:
                continue
            case = [name, minor, document]
            kind = (name, since)
            if error:
                head, rest = str(error).split(":\n    ", 1)
                printed, tail = rest.split("\n\nOn instance", 1)
                if len(tail) > QUOTED:
                    continue
                case += [head + ":", schemas.setdefault(printed, len(schemas)), "On instance" + tail]
                kind += (error.validator, tuple(error.schema_path))
            if not per_schema and (kind in seen or len(json.dumps(case)) > 1_500 or used > SIZE):
                continue
            seen.add(kind)
            cases.append(case)
            if per_schema:
                continue
            used = sum(len(json.dumps(text)) for text in schemas) + sum(len(json.dumps(case)) for case in cases)
    with open(path, "w") as out:
        out.write('{"schemas": [\n' + ",\n".join(json.dumps(text) for text in schemas))
        out.write('\n],\n"cases": [\n' + ",\n".join(json.dumps(case) for case in cases) + "\n]}\n")
    print(len(cases), "cases", len(schemas), "schemas")


main(sys.argv[1], *map(int, sys.argv[2:]))
