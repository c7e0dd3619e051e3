"""Signatures of members: each false one differs from the true one in a single way."""

import pytest
from kitmaking import HOST, Maker

from idiolect.deploy.identity import ADMIN, NODE, SERVER, Authority, Identity, Signed
from idiolect.deploy.protocol import Refused
from idiolect.errors import DeployError

WORDS = b"run 1, round 2, to site-0"


@pytest.fixture(scope="module")
def maker(tmp_path_factory):
    return Maker(tmp_path_factory.mktemp("kits"))


@pytest.fixture(scope="module")
def server(maker):
    return Identity.from_kit(maker.kit(HOST, "server"))


@pytest.fixture(scope="module")
def authority(maker):
    return Authority.from_kit(maker.kit("site-0"))


def refused(authority, signed, context=WORDS, name=HOST, role=SERVER):
    with pytest.raises(Refused) as told:
        authority.verify(signed, context, name=name, role=role)
    assert told.value.reason == "identity"
    return str(told.value)


def test_a_members_signature_holds_for_its_words_its_name_and_its_role_only(
    maker, server, authority
):
    signed = server.sign(WORDS)
    authority.verify(signed, WORDS, name=HOST, role=SERVER)
    refused(authority, signed, WORDS + b" ")
    refused(authority, signed._replace(signature=signed.signature[:-1] + b"\0"))
    refused(authority, signed, role=NODE)
    refused(authority, signed, role=ADMIN)
    refused(authority, signed, name="site-0", role=NODE)
    node = Identity.from_kit(maker.kit("site-1"))
    own = node.sign(WORDS)
    authority.verify(own, WORDS, name="site-1", role=NODE)
    assert "signed by node site-1" in refused(authority, own)
    refused(authority, own, name="site-0", role=NODE)
    refused(authority, Signed(signed.certificate, own.signature))
    refused(authority, Signed(own.certificate, signed.signature))


def test_no_admin_passes_for_the_server_and_no_node_for_an_admin(maker, authority):
    lead = Identity.from_kit(maker.kit("lead@hub.org", "admin"))
    assert "signed by admin" in refused(authority, lead.sign(WORDS))
    refused(authority, lead.sign(WORDS), name="lead@hub.org", role=NODE)
    authority.verify(lead.sign(WORDS), WORDS, name="lead@hub.org", role=ADMIN)
    # One whose certificate has the server's name, and a role.
    false = Identity.from_kit(maker.kit("false", "server", common=HOST, rights="lead"))
    assert f"signed by admin {HOST}" in refused(authority, false.sign(WORDS))


@pytest.mark.parametrize(("start", "days"), [(-10, 9), (1, 9)])
def test_certificates_are_valid_on_some_days_only(maker, authority, start, days):
    kit = maker.kit(f"late{start}", "server", common=HOST, start=start, days=days)
    assert "not valid today" in refused(authority, Identity.from_kit(kit).sign(WORDS))


def test_another_authority_of_the_same_name_certifies_nobody(maker, server, authority, tmp_path):
    other = Maker(tmp_path)
    false = Identity.from_kit(other.kit(HOST, "server"))
    assert "not of this federation" in refused(authority, false.sign(WORDS))
    # A member is no authority: what it signs with its key is no certificate.
    inner = maker.kit("inner", "server", common=HOST, signer=server._key)
    assert "not of this federation" in refused(authority, Identity.from_kit(inner).sign(WORDS))
    assert "not of this federation" in refused(authority, Signed(b"rubbish", b""))


def test_a_signature_of_the_engine_is_none_of_ours(server, authority):
    """The same key signs for FLARE, which lets the other side choose a part of the words."""
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
    from cryptography.hazmat.primitives.hashes import SHA256

    for words in (WORDS, b"idiolect signature 1\0" + WORDS):
        theirs = server._key.sign(words, PSS(MGF1(SHA256()), PSS.MAX_LENGTH), SHA256())
        refused(authority, Signed(server.certificate, theirs))


def test_kits_that_contradict_themselves_are_refused(maker, tmp_path):
    folder = maker.kit("site-7")
    text = (folder / "idiolect.toml").read_text()
    (folder / "idiolect.toml").write_text(text.replace("site-7", "site-8"))
    with pytest.raises(DeployError, match="its certificate is of 'site-7'"):
        Identity.from_kit(folder)
    (folder / "idiolect.toml").write_text(text)
    other = maker.kit("site-9")
    (folder / "startup" / "client.key").write_bytes((other / "startup" / "client.key").read_bytes())
    with pytest.raises(DeployError, match="is not the key of"):
        Identity.from_kit(folder)
    (folder / "startup" / "client.key").write_bytes(b"rubbish")
    with pytest.raises(DeployError, match="cannot be read"):
        Identity.from_kit(folder)
    with pytest.raises(DeployError, match="copy the kit again"):
        Authority.from_kit(tmp_path)
