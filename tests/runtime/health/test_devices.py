"""What the libraries of NVIDIA and AMD answer becomes figures; what they do not, or what breaks, harms nothing."""

import ctypes
import sys
from dataclasses import fields
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from ckptman.policies.health import HealthSample
from ckptman.runtime.health import devices
from ckptman.runtime.health.devices import DeviceLost, Host, open_device
from ckptman.runtime.host_memory import total_bytes

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
ADDRESS = "0000:c6:00.0"
NAMES = {each.name for each in fields(HealthSample)}


class Card:
    """A GPU behind the real `pynvml`, whose functions it answers in place of a driver."""

    def __init__(self, patch):
        self.errors = {}
        """The code of the error that a function raises."""
        self.xids = []
        self.ecc = 3
        self.throttled = 0x4 | 0x40
        answers = {
            "Init": lambda: None,
            "DeviceGetHandleByPciBusId": lambda address: address,
            "EventSetCreate": object,
            "DeviceRegisterEvents": lambda handle, kind, events: None,
            "EventSetWait_v2": self._next_xid,
            "DeviceGetEnforcedPowerLimit": lambda handle: 700_000,
            "DeviceGetPowerUsage": lambda handle: 612_345,
            "DeviceGetTemperatureThreshold": lambda handle, kind: 87,
            "DeviceGetTemperature": lambda handle, sensor: 61,
            "DeviceGetMaxClockInfo": lambda handle, kind: 1980,
            "DeviceGetClockInfo": lambda handle, kind: 990,
            "DeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=97, memory=40),
            "DeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=60 * 2**30, total=80 * 2**30),
            "DeviceGetPcieThroughput": lambda handle, kind: {pynvml.NVML_PCIE_UTIL_RX_BYTES: 1_500_000}.get(kind, 20),
            "DeviceGetCurrentClocksThrottleReasons": lambda handle: self.throttled,
            "DeviceGetTotalEccErrors": lambda handle, kind, since: self.ecc,
        }
        for name, answer in answers.items():
            patch.setattr(pynvml, f"nvml{name}", self._answering(name, answer))

    def _answering(self, name, answer):
        def ask(*arguments):
            if (code := self.errors.get(name, self.errors.get("all"))) is not None:
                raise pynvml.NVMLError(code)
            return answer(*arguments)

        return ask

    def _next_xid(self, events, milliseconds):
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=self.xids.pop(0))


@pytest.fixture
def card(monkeypatch):
    return Card(monkeypatch)


def test_figures_of_nvidia(card):
    device = open_device("nvidia", ADDRESS)
    card.ecc, card.xids = 5, [48, 63]
    sample = HealthSample(**device.read())
    assert sample == HealthSample(
        utilisation=0.97,
        power_watts=pytest.approx(612.345),
        power_limit_watts=700.0,
        memory_used_bytes=60 * 2**30,
        memory_total_bytes=80 * 2**30,
        pcie_in_bytes_per_second=1.5e9,
        pcie_out_bytes_per_second=20e3,
        temperature_celsius=61,
        slowdown_celsius=87,
        clock=0.5,
        throttled=("temperature, by hardware",),
        ecc_errors=2,
        xids=(48, 63),
    )
    assert device.read()["xids"] == ()


def test_what_a_gpu_does_not_know_is_left_out(card):
    unknown = ("EventSetCreate", "DeviceGetPcieThroughput", "DeviceGetUtilizationRates", "DeviceGetTotalEccErrors")
    card.errors = dict.fromkeys(unknown, pynvml.NVML_ERROR_NOT_SUPPORTED)
    figures = open_device("nvidia", ADDRESS).read()
    assert (figures["utilisation"], figures["pcie_in_bytes_per_second"], figures["ecc_errors"]) == (None, None, 0)
    assert figures["power_watts"] == pytest.approx(612.345)


def test_a_gpu_that_is_lost_or_tells_nothing(card):
    device = open_device("nvidia", ADDRESS)
    card.errors = {"DeviceGetPowerUsage": pynvml.NVML_ERROR_GPU_IS_LOST}
    with pytest.raises(DeviceLost):
        device.read()
    card.errors = {"DeviceGetPowerUsage": pynvml.NVML_ERROR_UNKNOWN}
    assert [device.read()["power_watts"] for _ in range(5)] == [None] * 5
    card.errors = {"all": pynvml.NVML_ERROR_UNKNOWN}
    assert device.read()["utilisation"] is None
    with pytest.raises(pynvml.NVMLError):
        open_device("nvidia", ADDRESS)
    names = ("DeviceGetPowerUsage", "DeviceGetTemperature", "DeviceGetUtilizationRates")
    card.errors = dict.fromkeys(names, pynvml.NVML_ERROR_NOT_SUPPORTED)
    with pytest.raises(RuntimeError, match="neither utilisation nor power nor temperature of 0000:c6"):
        open_device("nvidia", ADDRESS)


def fake_amdsmi(answers):
    """What of `amdsmi` 7.0 is used here; an answer that is an error is raised."""
    module = ModuleType("amdsmi")

    class AmdSmiException(Exception):
        pass

    def answering(answer):
        def ask(*arguments):
            if isinstance(answer, str):
                raise AmdSmiException(answer)
            return answer

        return ask

    module.AmdSmiException = AmdSmiException
    module.AmdSmiInitFlags = SimpleNamespace(INIT_AMD_GPUS=2)
    module.AmdSmiClkType = SimpleNamespace(GFX=0)
    module.AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    module.AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0, CRITICAL=5)
    module.amdsmi_init = lambda flags: None
    module.amdsmi_get_temp_metric = lambda handle, kind, metric: {0: 71, 5: 100}[metric]
    for name, answer in answers.items():
        setattr(module, f"amdsmi_get_{name}", answering(answer))
    return module


def test_figures_of_amd(monkeypatch):
    answers = {
        "processor_handle_from_bdf": ctypes.c_void_p(1),
        "gpu_activity": {"gfx_activity": 93, "umc_activity": 20, "mm_activity": "N/A"},
        "power_cap_info": {"power_cap": 750_000_000},
        "power_info": {"current_socket_power": "N/A", "average_socket_power": 640, "power_limit": 750},
        "gpu_vram_usage": {"vram_total": 196592, "vram_used": 1024},
        "clock_info": {"clk": 1050, "max_clk": 2100},
        "pcie_info": {"pcie_metric": {"pcie_bandwidth": 8000}},
        "violation_status": {"active_ppt_pwr": True, "active_hbm_thrm": True, "active_socket_thrm": "N/A"},
        "gpu_total_ecc_count": {"uncorrectable_count": 0},
    }
    monkeypatch.setitem(sys.modules, "amdsmi", fake_amdsmi(answers))
    assert HealthSample(**open_device("amd", ADDRESS).read()) == HealthSample(
        utilisation=0.93,
        power_watts=640,
        power_limit_watts=750,
        memory_used_bytes=2**30,
        memory_total_bytes=196592 * 2**20,
        pcie_in_bytes_per_second=1e9,
        temperature_celsius=71,
        slowdown_celsius=100,
        clock=0.5,
        throttled=("temperature of its memory",),
    )
    # The second of two in one package has no power of its own; and what is refused is left out.
    other = {**answers, "power_info": {"current_socket_power": 0}, "gpu_activity": "not supported", "clock_info": "no"}
    monkeypatch.setitem(sys.modules, "amdsmi", fake_amdsmi(other))
    figures = open_device("amd", ADDRESS).read()
    assert (figures["power_watts"], figures["utilisation"], figures["clock"]) == (None, None, None)


def test_figures_of_the_host(tmp_path, monkeypatch):
    counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    monkeypatch.setattr(devices, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(devices, "_NETWORKS", tmp_path / "none")  # what else this machine sends does not count
    times = iter([100.0, 110.0])
    (counters / "port_rcv_data").write_text("1000\n")
    (counters / "port_xmit_data").write_text("7\n")
    machine = Host(clock=lambda: next(times))
    (counters / "port_rcv_data").write_text("251000\n")
    (counters / "port_xmit_data").write_text("3\n")  # begun anew
    figures = machine.read()
    assert set(figures) <= NAMES
    assert figures["network_in_bytes_per_second"] == 100e3
    assert figures["network_out_bytes_per_second"] == 0
    assert 0 < figures["host_available_bytes"] <= figures["host_total_bytes"]


def test_the_memory_of_a_job_is_what_its_limit_leaves(tmp_path):
    # Else 64 GB of a machine of 2 TB were always too few.
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.max").write_text("64000\n")
    (tmp_path / "job" / "memory.current").write_text("1000\n")
    (tmp_path / "own").write_text("0::/job\n")
    assert total_bytes(tmp_path, tmp_path / "own") == 64000
    (tmp_path / "job" / "memory.max").write_text("max\n")
    assert total_bytes(tmp_path, tmp_path / "own") == psutil.virtual_memory().total
