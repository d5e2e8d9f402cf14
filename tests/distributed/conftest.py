"""The marker `ranks(n, ...)`: the body of a test runs in every rank of a process group of n ranks."""

import pytest

from tests.forked_python import start_server


def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(n, ...): run the body in each rank of a group of n ranks, for every n")


def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker:
        metafunc.fixturenames.append("world_size")
        metafunc.parametrize("world_size", marker.args, ids=[f"{n}ranks" for n in marker.args])


def pytest_itemcollected(item):
    if item.get_closest_marker("ranks"):
        item.add_marker(pytest.mark.xdist_group("ranks"))  # one worker: groups are started once


@pytest.fixture(scope="session", autouse=True)
def forked_with_torch():
    start_server()


@pytest.fixture(scope="session")
def rank_groups():
    from tests.distributed.rank_group import RankGroups

    groups = RankGroups()
    yield groups
    groups.close()


@pytest.fixture(scope="module")
def alone():
    """This process as a group of one."""
    from cs336_systems.parallel.launch import process_group

    with process_group("gloo", "cpu") as rank:
        yield rank


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    __tracebackhide__ = True
    if not pyfuncitem.get_closest_marker("ranks"):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    groups, world_size = pyfuncitem._request.getfixturevalue("rank_groups"), pyfuncitem.callspec.params["world_size"]
    failure = groups.run(world_size, pyfuncitem.module.__name__, pyfuncitem.originalname, arguments)
    if failure:
        pytest.fail(failure, pytrace=False)
    return True
