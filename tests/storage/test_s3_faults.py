"""A real S3 server behind a proxy that misbehaves: each fault ends in a typed error, or in success.

And whatever the proxy does to an append of the log, the log ends with the old or the new entry, and
the writer is never told that another was there first.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from tests.kit.crash_save import expected_files, faults_found, faults_going_on, prepare, save
from tests.kit.logs import commit, generation, open_log
from tests.kit.s3_proxy import Action, Fault, S3Proxy
from tests.kit.servers import BUCKET, PART_BYTES, SECRET_KEY, Place, free_ports
from tests.kit.store_suite import pattern

from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.log import read_entries
from keepstep.storage.errors import (
    Denied,
    NoSpace,
    NotFound,
    OutcomeUnknown,
    Permanent,
    StoreError,
    Throttled,
    Transient,
)
from keepstep.storage.store import Store

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'keepstep[s3]'")

from keepstep.storage.retry import REPEATABLE, RetryingStore, RetryPolicy
from keepstep.storage.s3 import S3Store
from keepstep.storage.s3_client import S3Client, S3Options

pytestmark = [pytest.mark.slow, pytest.mark.servers]  # a server to start, and time-outs to wait for

OPTIONS = S3Options(
    part_bytes=PART_BYTES,
    page_keys=7,
    connect_timeout_s=60.0,
    silence_timeout_s=60.0,
    request_timeout_s=120.0,
    retry=RetryPolicy(deadline_s=120.0, pause_first_s=0.01, throttled_first_s=0.02),
)
"""However busy the machine, nothing times out by itself."""
HASTY = replace(OPTIONS, silence_timeout_s=2.0)
"""For what never answers: only where a time-out more than expected changes nothing."""
EXPECTED = expected_files()
WRITES: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("a/k", b"new"),
    "put_if_absent": lambda store: store.put_if_absent("a/fresh", b"new"),
    "delete": lambda store: store.delete("a/k"),
}
CALLS: dict[str, Callable[[Store], object]] = {
    **WRITES,
    "get": lambda store: store.get("a/k", 10),
    "stat": lambda store: store.stat("a/k"),
}
"""Each one request. What takes several is patient by itself, and has tests of its own."""


@pytest.fixture(scope="module")
def proxy(seaweedfs_place: Place) -> Iterator[S3Proxy]:
    with S3Proxy(seaweedfs_place.server.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def client(proxy: S3Proxy) -> Iterator[S3Client]:
    client = S3Client(BUCKET, OPTIONS)
    yield client
    client.close()


@pytest.fixture(scope="module")
def hasty(proxy: S3Proxy) -> Iterator[S3Client]:
    client = S3Client(BUCKET, HASTY)
    yield client
    client.close()


class Ground:
    """A fresh prefix with one object, seen through the proxy and past it."""

    def __init__(self, place: Place, client: S3Client) -> None:
        self.prefix = f"faults/{secrets.token_hex(8)}"
        self.store = S3Store(client, self.prefix)
        self.raw = place.raw
        self.raw.put(f"{self.prefix}/a/k", b"old")
        assert self.store.capabilities.put_if_absent

    def get_raw(self, key: str) -> bytes | None:
        return self.raw.get(f"{self.prefix}/{key}")


@pytest.fixture
def ground(
    seaweedfs_place: Place, proxy: S3Proxy, client: S3Client, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ground]:
    for name, value in seaweedfs_place.server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    proxy.set_faults()
    yield Ground(seaweedfs_place, client)
    proxy.set_faults()


def refusal(status: int, code: str) -> Fault:
    return Fault(Action.STATUS, status=status, code=code)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (refusal(503, "SlowDown"), Throttled, "asks for fewer requests"),
        (refusal(400, "RequestTimeout"), Transient, "try again"),
        (refusal(403, "AccessDenied"), Denied, "credentials are refused"),
        (refusal(400, "ExpiredToken"), Denied, "credentials have expired: renew them"),
        (refusal(403, "RequestTimeTooSkewed"), Denied, "clock"),
        (refusal(507, "QuotaExceeded"), NoSpace, "raise the quota"),
        (refusal(501, "NotImplemented"), Permanent, "will fail again"),
        (refusal(404, "NoSuchBucket"), Permanent, "bucket is not there"),
    ],
    ids=lambda value: value.code if isinstance(value, Fault) else "",
)
def test_what_the_server_says_is_told_plainly(
    ground: Ground, proxy: S3Proxy, fault: Fault, kind: type[StoreError], words: str, name: str
) -> None:
    if name == "stat":
        pytest.skip("an answer to HEAD has no body to say it in")
    proxy.set_faults(fault)
    with pytest.raises(kind, match=words) as caught:
        CALLS[name](ground.store)
    assert not isinstance(caught.value, NotFound)
    assert SECRET_KEY not in str(caught.value)
    assert ground.get_raw("a/k") == b"old"
    assert ground.get_raw("a/fresh") is None


UNKNOWN = [
    Fault(Action.STATUS, status=500, code="InternalError"),
    Fault(Action.STATUS, status=503),
    Fault(Action.STATUS_AFTER, status=504),
    Fault(Action.RESET),
    Fault(Action.LOSE_ANSWER),
    Fault(Action.HANG),
    Fault(Action.LAND_LATE, seconds=0.3),
]


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("fault", UNKNOWN, ids=lambda fault: f"{fault.action.name}{fault.status}")
def test_a_write_without_a_good_answer_is_unknown_and_never_a_conflict(
    ground: Ground, proxy: S3Proxy, hasty: S3Client, fault: Fault, name: str
) -> None:
    store = S3Store(hasty, ground.prefix) if fault.action is Action.HANG else ground.store
    assert store.capabilities.put_if_absent  # the probe would be struck otherwise
    proxy.set_faults(fault)
    try:
        WRITES[name](store)
    except OutcomeUnknown:
        sent = len(proxy.requests)
    else:
        # The network library sends some a second time, on a connection that it had used before.
        assert name != "put_if_absent"
        return
    if name == "put_if_absent":
        assert sent == 1
    proxy.wait_for_late()
    assert ground.get_raw("a/k") in (b"old", b"new", None if name == "delete" else b"new")
    proxy.set_faults(fault)
    patient = RetryingStore(store, OPTIONS.retry, repeats_unknown=REPEATABLE)
    if name == "put":
        patient.put("a/k", b"new")
        proxy.wait_for_late()
        assert ground.get_raw("a/k") == b"new"
    if name == "delete":
        patient.delete("a/k")
        proxy.wait_for_late()
        assert ground.get_raw("a/k") is None


@pytest.mark.parametrize(
    "fault",
    [
        *UNKNOWN[:5],
        Fault(Action.STATUS, status=503, code="SlowDown"),
        Fault(Action.TRUNCATE),
        Fault(Action.HANG),
        Fault(Action.SLOW, seconds=0.5),
        Fault(Action.TRICKLE, seconds=0.01),
    ],
    ids=lambda fault: f"{fault.action.name}{fault.status}",
)
def test_a_read_ends_with_the_right_bytes_or_may_be_repeated(
    ground: Ground, proxy: S3Proxy, hasty: S3Client, fault: Fault
) -> None:
    store = S3Store(hasty, ground.prefix) if fault.action is Action.HANG else ground.store
    patient = RetryingStore(store, OPTIONS.retry)
    for read in (
        lambda store: store.get("a/k", 10) == b"old",
        lambda store: store.get_range("a/k", 1, 2) == b"ld",
        lambda store: store.stat("a/k").size_bytes == 3,
        lambda store: [info.key for info in store.list("")] == ["a/k"],
    ):
        proxy.set_faults(fault)
        assert read(patient)
    proxy.set_faults(fault)
    with suppress(Transient):
        assert store.get("a/k", 10) == b"old"


def test_a_range_of_which_half_is_called_the_whole_is_read_again(
    ground: Ground, proxy: S3Proxy
) -> None:
    proxy.set_faults(Fault(Action.LIE_ABOUT_LENGTH, times=2))
    assert ground.store.get_range("a/k", 0, 3) == b"old"
    assert len(proxy.requests) == 3


def test_a_404_that_says_nothing_is_not_the_end_of_the_log(ground: Ground, proxy: S3Proxy) -> None:
    proxy.set_faults(Fault(Action.STATUS, status=404))
    with pytest.raises(Permanent, match="is this an S3 endpoint") as caught:
        ground.store.get("log/000000/000000000", 10)
    assert not isinstance(caught.value, NotFound)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Action.STATUS, status=503, code="SlowDown", times=2),
        Fault(Action.STATUS, status=500, code="InternalError"),
        Fault(Action.LOSE_ANSWER),
        Fault(Action.STATUS_AFTER, status=502),
        Fault(Action.TRUNCATE),
        Fault(Action.DAMAGE_REQUEST),
    ],
    ids=lambda fault: f"{fault.action.name}{fault.status}",
)
def test_a_large_object_goes_up_and_down_whole_whichever_request_fails(
    ground: Ground, proxy: S3Proxy, fault: Fault
) -> None:
    data = pattern(2 * PART_BYTES + 77, seed=3)
    for at in range(7):  # create, three parts, complete; and one more of each kind
        proxy.set_faults(replace(fault, at=at))
        ground.store.put("a/big", data)
        assert ground.get_raw("a/big") == data
    target = memoryview(bytearray(len(data) - 5))
    for at in range(3):
        proxy.set_faults(replace(fault, at=at))
        target[:] = bytes(target.nbytes)
        ground.store.read_into("a/big", 5, target)
        assert target == data[5:]
    ground.store.delete("a/big")
    assert [info.key for info in ground.store.leftovers("") if info.size_bytes] == []


def test_a_server_that_forgets_what_it_completed_leaves_the_outcome_unknown(
    ground: Ground, proxy: S3Proxy
) -> None:
    data = pattern(2 * PART_BYTES, seed=4)
    complete = Fault(Action.LOSE_ANSWER, method="POST", contains="uploadId=")
    again = replace(complete, action=Action.STATUS, at=1, status=404, code="NoSuchUpload")
    proxy.set_faults(complete, again)
    with pytest.raises(OutcomeUnknown, match="upload is gone"):
        ground.store.put("a/k", data)
    assert ground.get_raw("a/k") == data
    proxy.set_faults(complete, again)
    RetryingStore(ground.store, OPTIONS.retry, repeats_unknown=REPEATABLE).put("a/k", data)
    proxy.set_faults(replace(again, at=0))
    with pytest.raises(NotFound, match="upload is gone"):
        ground.store.put("a/k", data)


def test_a_large_put_that_fails_for_good_keeps_the_old_and_leaves_no_parts(
    ground: Ground, proxy: S3Proxy
) -> None:
    proxy.set_faults(
        Fault(Action.STATUS, at=1, times=10_000, method="PUT", status=403, code="ExpiredToken")
    )
    with pytest.raises(Denied, match="expired"):
        ground.store.put("a/k", bytes(3 * PART_BYTES))
    assert ground.get_raw("a/k") == b"old"
    assert ground.raw.uploads(ground.prefix) == []


def test_an_upload_that_could_not_be_aborted_is_a_leftover(ground: Ground, proxy: S3Proxy) -> None:
    proxy.set_faults(
        Fault(Action.STATUS, times=10_000, method="PUT", status=403, code="AccessDenied"),
        Fault(Action.STATUS, times=10_000, method="DELETE", status=500),
    )
    with pytest.raises(Denied):
        ground.store.put("a/k", bytes(2 * PART_BYTES))
    proxy.set_faults()
    (left,) = ground.store.leftovers("a/")
    assert left.key == "a/k"
    ground.store.sweep(left)
    assert list(ground.store.leftovers("")) == []
    assert ground.get_raw("a/k") == b"old"


def test_a_server_that_knows_no_uploads_has_none_and_one_without_the_bucket_is_an_error(
    ground: Ground, proxy: S3Proxy
) -> None:
    """rclone says NoSuchUpload where there are none."""
    proxy.set_faults(Fault(Action.STATUS, status=404, code="NoSuchUpload", contains="uploads"))
    assert list(ground.store.leftovers("")) == []
    assert len(proxy.requests) == 1
    for fault in (refusal(404, "NoSuchBucket"), Fault(Action.STATUS, status=404)):
        proxy.set_faults(fault)
        with pytest.raises(Permanent) as caught:
            list(ground.store.leftovers(""))
        assert not isinstance(caught.value, NotFound)


def test_no_more_parts_are_under_way_than_was_said(ground: Ground, proxy: S3Proxy) -> None:
    proxy.set_faults(Fault(Action.SLOW, times=10_000, method="PUT", seconds=0.2))
    size_bytes = 6 * PART_BYTES
    with ThreadPoolExecutor(2) as pool:  # the bound is the store's, not the put's
        for put in [pool.submit(ground.store.put, f"a/{n}", bytes(size_bytes)) for n in range(2)]:
            put.result()
    # A busy server may let one time out: the proxy then holds what was given up, and its repeat.
    sent_anew = [method for method, _ in proxy.requests].count("PUT") - 12
    assert OPTIONS.parts_at_once <= proxy.puts_at_once <= OPTIONS.parts_at_once + sent_anew


def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(
    ground: Ground, proxy: S3Proxy
) -> None:
    old, new = (bytes([n]) * (2 * PART_BYTES) for n in (1, 2))
    ground.store.put("a/big", old)
    proxy.set_faults(Fault(Action.HOLD, at=1, method="GET"))
    target = memoryview(bytearray(len(old)))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(ground.store.read_into, "a/big", 0, target)
        try:
            proxy.wait_for_requests(2)
            ground.raw.put(f"{ground.prefix}/a/big", new)
        finally:
            proxy.release()
        with pytest.raises(Transient, match="replaced while it was read"):
            reading.result()
    ground.store.read_into("a/big", 0, target)
    assert target == new


def test_damage_on_the_way_up_is_refused_by_the_server(ground: Ground, proxy: S3Proxy) -> None:
    for name in ("put", "put_if_absent"):
        proxy.set_faults(Fault(Action.DAMAGE_REQUEST))
        with pytest.raises(Transient, match="damaged"):
            WRITES[name](ground.store)
    assert ground.get_raw("a/k") == b"old"
    assert ground.get_raw("a/fresh") is None


def test_nobody_at_the_endpoint_is_transient(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{free_ports(1)[0]}")
    client = S3Client(BUCKET, OPTIONS)
    nowhere = S3Store(client, "p")
    for call in (lambda: nowhere.put("k", b""), lambda: nowhere.get("k", 1)):
        with pytest.raises(Transient, match="check the endpoint"):
            call()
    client.close()


def append_all(store: Store) -> None:
    log = open_log(store)
    log.take_term("trainer")
    log.append(generation(1))
    log.append(commit(1, 10))


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Action.STATUS, status=500, code="InternalError"),
        Fault(Action.STATUS, status=503, code="SlowDown"),
        Fault(Action.STATUS_AFTER, status=502),
        Fault(Action.RESET),
        Fault(Action.LOSE_ANSWER),
        Fault(Action.LAND_LATE, seconds=0.05),
        Fault(Action.TRUNCATE),
    ],
    ids=lambda fault: f"{fault.action.name}{fault.status}",
)
def test_one_fault_anywhere_leaves_the_log_as_if_there_had_been_none(
    ground: Ground, proxy: S3Proxy, seaweedfs_place: Place, client: S3Client, fault: Fault
) -> None:
    at, requests = 0, 1
    while at < requests:
        store = S3Store(client, f"{ground.prefix}/{at}")
        proxy.set_faults(replace(fault, at=at))
        append_all(RetryingStore(store, OPTIONS.retry, repeats_unknown=REPEATABLE))
        requests = len(proxy.requests)
        proxy.wait_for_late()
        proxy.set_faults()
        kinds = [type(record.body).__name__ for record in read_entries(store)]
        assert kinds == ["Term", "Generation", "Commit"], at
        at += 1
    assert requests >= 8


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Action.STATUS, status=500, code="InternalError"),
        Fault(Action.STATUS_AFTER, status=503),
        Fault(Action.RESET),
        Fault(Action.TRUNCATE),
        Fault(Action.LIE_ABOUT_LENGTH),
        Fault(Action.DAMAGE_REQUEST),
        Fault(Action.DAMAGE_ANSWER),
    ],
    ids=lambda fault: f"{fault.action.name}{fault.status}",
)
def test_one_fault_in_a_save_leaves_the_old_commit_or_the_new_one(
    ground: Ground, proxy: S3Proxy, client: S3Client, fault: Fault
) -> None:
    """Every third request, beginning elsewhere for each kind; tests/crash has the whole sweep."""
    inner = S3Store(client, f"{ground.prefix}/count")
    prepare(inner)
    proxy.set_faults()
    save(inner)
    requests = len(proxy.requests)
    assert requests >= 20
    for at in range(len(fault.action.name) % 3, requests, 3):
        inner = S3Store(client, f"{ground.prefix}/{at}")
        prepare(inner)
        acknowledged: list[bool] = []
        store = RetryingStore(inner, OPTIONS.retry, repeats_unknown=REPEATABLE)
        proxy.set_faults(replace(fault, at=at))
        with suppress(StoreError, CheckpointError):
            save(store, lambda acknowledged=acknowledged: acknowledged.append(True))
        proxy.set_faults()
        assert faults_found(inner, bool(acknowledged), EXPECTED) == [], (at, proxy.requests)
    assert faults_going_on(inner) == []


def test_an_append_that_gives_up_has_left_the_old_log_or_the_new_one(
    ground: Ground, proxy: S3Proxy
) -> None:
    append_all(ground.store)
    for number, action in enumerate((Action.STATUS, Action.STATUS_AFTER)):
        log = open_log(ground.store)
        log.take_term("trainer")
        before = len(list(read_entries(ground.store)))
        proxy.set_faults(Fault(action, method="PUT", times=10_000, status=504))
        with pytest.raises(OutcomeUnknown):
            log.append(commit(1, 20 + number))
        proxy.set_faults()
        after = len(list(read_entries(ground.store)))
        assert after == before + (action is Action.STATUS_AFTER)
