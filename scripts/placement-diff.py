#!/usr/bin/env python3
"""Sends the same random writes and queries to two Placement servers and compares what they answer.

usage: placement-diff.py REFERENCE_URL OUR_URL [--seed N] [--rounds N] [--queries N] [--minutes M] [--replay FILE]

The reference is OpenStack's server, whose known defects are told apart (see `Verdict`). Each round makes a
world of nested and sharing providers with inventories, traits, aggregates and allocations, asks many questions
of it, and takes it away again. At the first real difference the requests of that round are written to a file,
which `--replay` sends again, and the exit code is 1.
"""

import argparse
import http.client
import json
import random
import sys
import time
import urllib.parse
import uuid

CLASSES = ["VCPU", "MEMORY_MB", "DISK_GB", "SRIOV_NET_VF", "CUSTOM_GOLD"]
TRAITS = ["HW_CPU_X86_AVX", "HW_NIC_OFFLOAD_TSO", "STORAGE_DISK_SSD", "CUSTOM_A", "CUSTOM_B"]
SHARING = "MISC_SHARES_VIA_AGGREGATE"
VERSIONS = [0, 1, 3, 4, 7, 8, 10, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34]
VERSIONS += [35, 36, 37, 38, 39, 39, 39, 39, 39]
NOBODY = "99999999-9999-4999-8999-999999999999"


class Server:
    """A server to talk to."""

    def __init__(self, url):
        address = urllib.parse.urlsplit(url)
        self.connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)

    def send(self, request):
        """Status, headers of interest and document of the answer."""
        headers = {
            "X-Auth-Token": "admin",
            "X-Roles": "admin,service",
            "OpenStack-API-Version": f"placement 1.{request['minor']}",
            "Accept": "application/json",
        }
        body = request.get("body")
        if body is not None:
            headers["Content-Type"] = "application/json"
            body = json.dumps(body)
        for attempt in range(2):
            try:
                self.connection.request(request["method"], request["path"], body, headers)
                answer = self.connection.getresponse()
                text = answer.read()
                break
            except (http.client.HTTPException, ConnectionError):
                self.connection.close()
                if attempt:
                    raise
        kept = {name: answer.headers.get(name) for name in ("content-type", "openstack-api-version", "cache-control")}
        kept["content-type"] = (kept["content-type"] or "").split(";")[0]
        kept["dated"] = answer.headers.get("last-modified") is not None
        location = answer.headers.get("location")
        kept["location"] = location and urllib.parse.urlsplit(location).path
        try:
            document = json.loads(text) if text else None
        except ValueError:
            document = text.decode(errors="replace")
        return answer.status, kept, document


def normal(value):
    """A document without the order that means nothing, and without what differs in any case."""
    if isinstance(value, list):
        return sorted((normal(one) for one in value), key=lambda one: json.dumps(one, sort_keys=True))
    if isinstance(value, dict):
        if "errors" in value:
            return [{key: one.get(key) for key in ("status", "title", "code")} for one in value["errors"]]
        return {key: normal(one) for key, one in value.items()}
    return value


class Verdict:
    """What two answers are to each other."""

    SAME, DIFFERENT = "same", "different"
    # placement.md, or found by this program; each is OpenStack's, and narrow.
    CRASH = "the reference answers 500"
    ANCHORS = "the reference loses candidates whose unsuffixed group is served by sharing providers alone"

    @staticmethod
    def of(request, left, right, world):
        if left[0] >= 500:
            return Verdict.CRASH if right[0] < 500 else Verdict.DIFFERENT
        if left[:2] != right[:2]:
            return Verdict.DIFFERENT
        ours, theirs = normal(right[2]), normal(left[2])
        if ours == theirs:
            return Verdict.SAME
        if "limit=" in request["path"] and "/allocation_candidates" in request["path"]:
            # Which of them is nobody's promise; how many is.
            return Verdict.SAME if count(left[2]) == count(right[2]) else Verdict.DIFFERENT
        if "/allocation_candidates" in request["path"] and left[0] == 200 and Verdict.lost_anchors(left[2], right[2], world):
            return Verdict.ANCHORS
        return Verdict.DIFFERENT

    @staticmethod
    def lost_anchors(theirs, ours, world):
        known = {json.dumps(normal(one), sort_keys=True) for one in theirs["allocation_requests"]}
        found = {json.dumps(normal(one), sort_keys=True): one for one in ours["allocation_requests"]}
        if not known <= found.keys():
            return False
        extra = [one for text, one in found.items() if text not in known]
        if not extra:
            # The same with another mapping, which an answer before 1.34 does not show.
            return count(theirs) < count(ours) and normal(theirs["provider_summaries"]) == normal(ours["provider_summaries"])
        sharing = {uuid_ for uuid_, provider in world.items() if SHARING in provider["traits"]}
        # Before 1.34 an answer does not say who serves which group.
        told = [set(one["mappings"].get("", ["-"])) <= sharing if "mappings" in one else users(one) & sharing for one in extra]
        return bool(told) and all(told)


def users(candidate):
    """The providers of a candidate."""
    found = candidate["allocations"]
    return set(found) if isinstance(found, dict) else {one["resource_provider"]["uuid"] for one in found}


def count(document):
    """How many candidates."""
    return len(document["allocation_requests"]) if isinstance(document, dict) and "allocation_requests" in document else None


class Round:
    """One world, and what is asked of it."""

    def __init__(self, dice, send):
        self.dice = dice
        self.send = send
        self.providers = {}
        self.consumers = {}
        self.aggregates = [self.uuid() for _ in range(3)]

    def uuid(self):
        return str(uuid.UUID(int=self.dice.getrandbits(128), version=4))

    def some(self, values, most):
        return self.dice.sample(values, self.dice.randint(0, min(most, len(values))))

    def call(self, method, path, body=None, minor=39):
        return self.send({"method": method, "path": path, "body": body, "minor": minor}, self.providers)

    # ---- the world --------------------------------------------------------------------------------

    def build(self):
        for name in ("CUSTOM_A", "CUSTOM_B"):
            self.call("PUT", f"/traits/{name}")
        self.call("PUT", "/resource_classes/CUSTOM_GOLD")
        nested, sharing = self.dice.random() < 0.7, self.dice.random() < 0.6
        for _ in range(self.dice.randint(1, 4)):
            root = self.provider(None)
            below = [root]
            for _ in range(self.dice.randint(0, 4) if nested else 0):
                below.append(self.provider(self.dice.choice(below)))
        for _ in range(self.dice.randint(1, 2) if sharing else 0):
            # Now and then inside another tree.
            parent = self.dice.choice(list(self.providers)) if nested and self.dice.random() < 0.2 else None
            self.provider(parent, shares=True)
        for _ in range(self.dice.randint(0, 6)):
            self.allocate()

    def provider(self, parent, shares=False):
        own = self.uuid()
        body = {"name": f"p-{own[:13]}", "uuid": own}
        if parent:
            body["parent_provider_uuid"] = parent
        self.call("POST", "/resource_providers", body)
        self.providers[own] = {"generation": 0, "traits": [], "inventories": {}, "parent": parent}
        self.set_inventories(own, ["DISK_GB"] + self.some(CLASSES[3:], 1) if shares else self.some(CLASSES, 4))
        self.set_traits(own, self.some(TRAITS, 3) + ([SHARING] if shares else []))
        self.set_aggregates(own, [self.dice.choice(self.aggregates)] if shares else self.some(self.aggregates, 2))
        return own

    def inventory(self):
        total = self.dice.choice([1, 2, 4, 8, 10, 16])
        found = {"total": total}
        if self.dice.random() < 0.3:
            found["reserved"] = self.dice.randint(0, total - 1)
        if self.dice.random() < 0.3:
            found["allocation_ratio"] = self.dice.choice([0.5, 1.5, 2.0, 4.25])
        if self.dice.random() < 0.2:
            found["max_unit"] = self.dice.randint(1, total)
        if self.dice.random() < 0.2:
            found["step_size"] = self.dice.choice([1, 2])
        if self.dice.random() < 0.2:
            found["min_unit"] = self.dice.choice([1, 2])
        return found

    def changed(self, own, answer):
        if answer[0] == 200 and isinstance(answer[2], dict):
            generation = answer[2].get("resource_provider_generation")
            if generation is not None:
                self.providers[own]["generation"] = generation

    def set_inventories(self, own, classes, minor=39):
        known = self.providers[own]
        body = {"resource_provider_generation": known["generation"], "inventories": {one: self.inventory() for one in classes}}
        answer = self.call("PUT", f"/resource_providers/{own}/inventories", body, minor)
        if answer[0] == 200:
            known["inventories"] = body["inventories"]
        self.changed(own, answer)

    def set_traits(self, own, traits):
        body = {"resource_provider_generation": self.providers[own]["generation"], "traits": traits}
        answer = self.call("PUT", f"/resource_providers/{own}/traits", body)
        if answer[0] == 200:
            self.providers[own]["traits"] = traits
        self.changed(own, answer)

    def set_aggregates(self, own, aggregates):
        body = {"resource_provider_generation": self.providers[own]["generation"], "aggregates": aggregates}
        self.changed(own, self.call("PUT", f"/resource_providers/{own}/aggregates", body))

    def refresh(self):
        for own, known in self.providers.items():
            answer = self.call("GET", f"/resource_providers/{own}")
            if answer[0] == 200:
                known["generation"] = answer[2]["generation"]

    # ---- writes -----------------------------------------------------------------------------------

    def allocations(self):
        found = {}
        holders = [own for own, known in self.providers.items() if known["inventories"]]
        for own in self.some(holders, 2):
            classes = self.some(list(self.providers[own]["inventories"]), 2)
            if self.dice.random() < 0.05:
                classes = ["DISK_GB", "CUSTOM_NONE"]
            if classes:
                found[own] = {"resources": {one: self.dice.choice([1, 1, 1, 2, 3, 50]) for one in classes}}
        return found

    def consumer_body(self, consumer, allocations, minor):
        if minor < 12:
            listed = [{"resource_provider": {"uuid": own}, **one} for own, one in allocations.items()]
            body = {"allocations": listed}
        else:
            body = {"allocations": allocations}
        if minor >= 8:
            body.update(project_id=self.dice.choice(["p1", "p2"]), user_id=self.dice.choice(["u1", "u2"]))
        if minor >= 28:
            body["consumer_generation"] = self.consumers.get(consumer)
            if self.dice.random() < 0.05:
                body["consumer_generation"] = 77
        if minor >= 38:
            body["consumer_type"] = self.dice.choice(["INSTANCE", "MIGRATION"])
        return body

    def learn(self, consumer):
        answer = self.call("GET", f"/allocations/{consumer}")
        generation = answer[2].get("consumer_generation") if answer[0] == 200 else None
        if generation is None:
            self.consumers.pop(consumer, None)
        else:
            self.consumers[consumer] = generation

    def allocate(self):
        minor = self.dice.choice([0, 8, 12, 27, 28, 34, 38, 39])
        consumer = self.dice.choice(list(self.consumers)) if self.consumers and self.dice.random() < 0.4 else self.uuid()
        allocations = self.allocations()
        # A new consumer that gets nothing stays behind in the reference.
        if not allocations and consumer not in self.consumers:
            return
        self.call("PUT", f"/allocations/{consumer}", self.consumer_body(consumer, allocations, minor), minor)
        self.learn(consumer)

    def allocate_many(self):
        minor = self.dice.choice([13, 28, 34, 38])
        chosen = self.some(list(self.consumers), 2) + [self.uuid()]
        body = {}
        for consumer in chosen:
            allocations = self.allocations()
            if allocations or consumer in self.consumers:
                body[consumer] = self.consumer_body(consumer, allocations, minor)
        if body:
            self.call("POST", "/allocations", body, minor)
            for consumer in body:
                self.learn(consumer)
            self.refresh()

    def reshape(self):
        self.refresh()
        inventories = {}
        for own in self.some(list(self.providers), 2):
            known = self.providers[own]
            classes = self.some(CLASSES, 4) + list(known["inventories"])[: self.dice.randint(0, 3)]
            inventories[own] = {
                "resource_provider_generation": known["generation"] + (self.dice.random() < 0.1),
                "inventories": {one: self.inventory() for one in set(classes)},
            }
        allocations = {}
        for consumer in self.some(list(self.consumers), 2):
            allocations[consumer] = self.consumer_body(consumer, self.allocations(), 38)
        answer = self.call("POST", "/reshaper", {"inventories": inventories, "allocations": allocations}, 38)
        if answer[0] == 204:
            for own, one in inventories.items():
                self.providers[own]["inventories"] = one["inventories"]
        for consumer in allocations:
            self.learn(consumer)
        self.refresh()

    def write(self):
        dice, own = self.dice, self.dice.choice(list(self.providers) + [NOBODY])
        known = self.providers.get(own, {"generation": 0, "inventories": {}, "traits": []})
        path = f"/resource_providers/{own}"
        stale = known["generation"] + dice.choice([0, 0, 0, 1])
        minor = dice.choice(VERSIONS)
        one = dice.choice(CLASSES + ["CUSTOM_NONE"])
        choice = dice.randrange(16)
        if choice < 3:
            self.allocate()
        elif choice == 3:
            self.allocate_many()
        elif choice == 4:
            self.reshape()
        elif choice == 5:
            self.call("PUT", f"{path}/inventories/{one}", {"resource_provider_generation": stale, **self.inventory()}, minor)
        elif choice == 6:
            self.call("POST", f"{path}/inventories", {"resource_class": one, **self.inventory()}, minor)
        elif choice == 7:
            self.call("DELETE", f"{path}/inventories/{one}", None, minor)
        elif choice == 8:
            self.call("DELETE", f"{path}/inventories", None, minor)
        elif choice == 9:
            body = {"resource_provider_generation": stale, "traits": self.some(TRAITS + ["CUSTOM_NONE"], 2)}
            self.call("PUT", f"{path}/traits", body, minor)
        elif choice == 10:
            aggregates = self.some(self.aggregates, 2)
            body = aggregates if minor < 19 else {"resource_provider_generation": stale, "aggregates": aggregates}
            self.call("PUT", f"{path}/aggregates", body, minor)
        elif choice == 11:
            body = {"name": f"p-{self.uuid()[:13]}"}
            if minor >= 14 and dice.random() < 0.5:
                body["parent_provider_uuid"] = dice.choice(list(self.providers) + [None, NOBODY])
            self.call("PUT", path, body, minor)
        elif choice == 12:
            answer = self.call("DELETE", path, None, minor)
            if answer[0] == 204:
                self.providers.pop(own, None)
        elif choice == 13:
            self.call("DELETE", f"/traits/{dice.choice(TRAITS + ['CUSTOM_NONE'])}", None, minor)
            for name in ("CUSTOM_A", "CUSTOM_B"):
                self.call("PUT", f"/traits/{name}")
        elif choice == 14:
            consumer = dice.choice(list(self.consumers) or [NOBODY])
            self.call("DELETE", f"/allocations/{consumer}", None, minor)
            self.consumers.pop(consumer, None)
        else:
            self.call("DELETE", f"/resource_classes/{one}", None, minor)
            self.call("PUT", "/resource_classes/CUSTOM_GOLD")
        self.look()

    def look(self):
        """What is there now, for the next writes to fit."""
        self.refresh()
        for own, known in self.providers.items():
            answer = self.call("GET", f"/resource_providers/{own}/inventories")
            if answer[0] == 200:
                known["inventories"] = {one: {} for one in answer[2]["inventories"]}
            answer = self.call("GET", f"/resource_providers/{own}/traits")
            if answer[0] == 200:
                known["traits"] = answer[2]["traits"]

    # ---- queries ----------------------------------------------------------------------------------

    def resources(self):
        chosen = self.dice.sample(CLASSES, self.dice.choice([1, 1, 2, 3]))
        if self.dice.random() < 0.02:
            chosen.append("CUSTOM_NONE")
        return ",".join(f"{one}:{self.dice.choice([1, 1, 1, 2, 4])}" for one in chosen)

    def required(self, minor):
        names = self.some(TRAITS, 2) or [TRAITS[0]]
        if self.dice.random() < 0.03:
            names.append("CUSTOM_NONE")
        if minor >= 39 and self.dice.random() < 0.3:
            return "in:" + ",".join(names)
        return ",".join(("!" if self.dice.random() < 0.3 else "") + name for name in names)

    def member_of(self, minor):
        chosen = self.some(self.aggregates + [NOBODY], 2) or [self.aggregates[0]]
        text = chosen[0] if len(chosen) == 1 else "in:" + ",".join(chosen)
        return ("!" if minor >= 32 and self.dice.random() < 0.3 else "") + text

    def candidates(self):
        dice = self.dice
        minor = dice.choice([10, 12, 16, 17, 21, 22, 24, 25, 27, 29, 31, 32, 33, 34, 35, 36, 39, 39, 39, 39])
        suffixes = [""] if minor < 25 else dice.choice([[""], [""], ["", "1"], ["1"], ["1", "2"], ["", "1", "2"], ["", "1", "2", "3"]])
        pairs, used, overlap, grouped = [], set(), False, []
        for suffix in suffixes:
            bare = minor >= 36 and suffix and dice.random() < 0.15
            if not bare:
                text = self.resources()
                names = {one.split(":")[0] for one in text.split(",")}
                overlap |= bool(used & names)
                used |= names
                pairs.append((f"resources{suffix}", text))
            if minor >= 17 and (bare or dice.random() < 0.35):
                pairs.append((f"required{suffix}", self.required(minor)))
                if minor >= 39 and dice.random() < 0.3:
                    pairs.append((f"required{suffix}", self.required(minor)))
            if minor >= 21 and dice.random() < 0.25:
                pairs.append((f"member_of{suffix}", self.member_of(minor)))
                if minor >= 24 and dice.random() < 0.3:
                    pairs.append((f"member_of{suffix}", self.member_of(minor)))
            if minor >= 31 and dice.random() < 0.1:
                pairs.append((f"in_tree{suffix}", dice.choice(list(self.providers) + [NOBODY])))
            if bare:
                grouped.append(suffix)
        if minor >= 36 and (grouped or dice.random() < 0.3):
            suffixed = [one for one in suffixes if one]
            chosen = sorted(set(grouped) | set(self.some(suffixed, 3)))
            if chosen:
                pairs.append(("same_subtree", ",".join(chosen)))
        if minor >= 25 and len([one for one in suffixes if one]) > 0:
            # The reference adds amounts up across groups where the policy is not `none`.
            policy = "none" if overlap else dice.choice(["none", "isolate"])
            pairs.append(("group_policy", policy))
        if minor >= 35 and dice.random() < 0.15:
            pairs.append(("root_required", self.required(22)))
        if minor >= 16 and dice.random() < 0.1:
            pairs.append(("limit", str(dice.randint(1, 5))))
        dice.shuffle(pairs)
        self.call("GET", "/allocation_candidates?" + urllib.parse.urlencode(pairs), None, minor)

    def list_providers(self):
        dice, pairs = self.dice, []
        minor = dice.choice([0, 3, 4, 14, 18, 22, 24, 32, 39, 39])
        if dice.random() < 0.2:
            pairs.append(("uuid", dice.choice(list(self.providers) + [NOBODY])))
        if minor >= 3 and dice.random() < 0.4:
            pairs.append(("member_of", self.member_of(minor)))
        if minor >= 4 and dice.random() < 0.4:
            pairs.append(("resources", self.resources()))
        if minor >= 14 and dice.random() < 0.3:
            pairs.append(("in_tree", dice.choice(list(self.providers) + [NOBODY])))
        if minor >= 18 and dice.random() < 0.4:
            pairs.append(("required", self.required(minor)))
        self.call("GET", "/resource_providers?" + urllib.parse.urlencode(pairs), None, minor)

    def query(self):
        dice, minor = self.dice, self.dice.choice(VERSIONS)
        own = dice.choice(list(self.providers) + [NOBODY])
        choice = dice.randrange(20)
        if choice < 12:
            self.candidates()
        elif choice < 15:
            self.list_providers()
        elif choice == 15:
            part = dice.choice(["", "/inventories", "/usages", "/aggregates", "/traits", "/allocations", "/inventories/VCPU"])
            self.call("GET", f"/resource_providers/{own}{part}", None, minor)
        elif choice == 16:
            pairs = [("project_id", dice.choice(["p1", "p2", "p3"]))]
            if dice.random() < 0.5:
                pairs.append(("user_id", dice.choice(["u1", "u2"])))
            if dice.random() < 0.5:
                pairs.append(("consumer_type", dice.choice(["INSTANCE", "all", "unknown", "NONE"])))
            self.call("GET", "/usages?" + urllib.parse.urlencode(pairs), None, minor)
        elif choice == 17:
            self.call("GET", "/traits?" + dice.choice(["name=startswith:CUSTOM", "associated=true", "name=in:CUSTOM_A,X", "name=x"]), None, minor)
        elif choice == 18:
            self.call("GET", f"/allocations/{dice.choice(list(self.consumers) or [NOBODY])}", None, minor)
        else:
            self.call("GET", dice.choice(["/resource_classes", "/resource_classes/VCPU", "/traits/CUSTOM_A", "/", "/nothing"]), None, minor)

    def clear(self):
        """Takes the world away."""
        for consumer in list(self.consumers):
            self.call("DELETE", f"/allocations/{consumer}")
        for _ in range(8):
            for own in list(self.providers):
                if self.call("DELETE", f"/resource_providers/{own}")[0] in (204, 404):
                    self.providers.pop(own, None)
            if not self.providers:
                break


class Difference(Exception):
    """Two answers that should be the same."""


class Comparison:
    """Both servers, and what was found so far."""

    def __init__(self, reference, ours):
        self.servers = [Server(reference), Server(ours)]
        self.counts = {}
        self.history = []

    def send(self, request, world):
        self.history.append(request)
        left, right = (server.send(request) for server in self.servers)
        verdict = Verdict.of(request, left, right, world)
        self.counts[verdict] = self.counts.get(verdict, 0) + 1
        if verdict == Verdict.DIFFERENT:
            raise Difference(f"{json.dumps(request)}\n  reference: {left}\n  ours:      {right}")
        return left


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference")
    parser.add_argument("ours")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--queries", type=int, default=60)
    parser.add_argument("--minutes", type=float, help="go on with further seeds for so long")
    parser.add_argument("--replay", help="send the requests of this file instead")
    parser.add_argument("--log", default="placement-diff.jsonl", help="where the requests of a difference go")
    options = parser.parse_args()
    comparison = Comparison(options.reference, options.ours)
    if options.replay:
        with open(options.replay, encoding="utf-8") as lines:
            for line in lines:
                comparison.send(json.loads(line), {})
        print(f"{sum(comparison.counts.values())} requests, all answered alike")
        return 0
    began, seed, end = time.monotonic(), options.seed, options.seed + options.rounds
    while seed < end or (options.minutes and time.monotonic() - began < options.minutes * 60):
        comparison.history = []
        world = Round(random.Random(seed), comparison.send)
        try:
            world.build()
            for _ in range(options.queries):
                world.query() if world.dice.random() < 0.85 else world.write()
                if not world.providers:
                    break
            world.clear()
        except Difference as difference:
            with open(options.log, "w", encoding="utf-8") as log:
                log.writelines(json.dumps(request) + "\n" for request in comparison.history)
            print(f"seed {seed}: {difference}\nthe requests so far are in {options.log}")
            return 1
        seed += 1
        if seed % 5 == 0:
            print(f"seed {seed}, {sum(comparison.counts.values())} requests, {time.monotonic() - began:.0f} s", flush=True)
    for verdict, number in sorted(comparison.counts.items()):
        print(f"{number:7} {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
