"""The dictionary of all series: the one table that docs, preflight and tests are made from."""

from __future__ import annotations

from typing import NamedTuple

NODE = "node"
ROOTFS = "rootfs"
POD = "pod"
GPU = "gpu"
CONTAINER = "container"


class Series(NamedTuple):
    """One series. `<i>` in a name is the GPU's position in the job's visible list."""

    name: str
    unit: str
    scope: str
    source: str
    english: str
    korean: str
    needs: str = ""
    """What must be there: "memory" or "cpu" = such a limit, "psi" = that kernel feature."""


SCOPES = {
    NODE: ("the whole node, all its containers and users", "노드 전체(모든 컨테이너와 사용자)"),
    ROOTFS: ("the container's root file system", "컨테이너의 루트 파일 시스템"),
    POD: ("the pod, that is its network namespace", "파드, 즉 네트워크 네임스페이스"),
    GPU: ("one GPU of the job", "작업의 GPU 한 장"),
    CONTAINER: ("the container or job that the limit holds", "한도가 걸린 컨테이너 또는 작업"),
}

SERIES = (
    Series(
        "node_cpu_utilization_percentage",
        "%",
        NODE,
        "psutil: /proc/stat",
        "CPU of all processes on the node, not of this job alone.",
        "이 작업만이 아니라 노드의 모든 프로세스가 쓴 CPU.",
    ),
    Series(
        "node_memory_usage_megabytes",
        "MB",
        NODE,
        "psutil: /proc/meminfo",
        "Memory in use on the node. Says nothing about this job's limit.",
        "노드에서 쓰이는 메모리. 이 작업의 한도와는 무관하다.",
    ),
    Series(
        "node_memory_usage_percentage",
        "%",
        NODE,
        "psutil: /proc/meminfo",
        "The same, of the node's memory. A low value is no sign that the job is safe from OOM.",
        "같은 값의 노드 메모리 대비 비율. 낮다고 해서 작업이 OOM에서 안전하다는 뜻이 아니다.",
    ),
    Series(
        "rootfs_usage_megabytes",
        "MB",
        ROOTFS,
        "psutil: statvfs(/)",
        "Used space of the file system at /; often the node's disk, shared by all containers.",
        "/ 파일 시스템의 사용량. 흔히 모든 컨테이너가 함께 쓰는 노드 디스크다.",
    ),
    Series(
        "rootfs_usage_percentage",
        "%",
        ROOTFS,
        "psutil: statvfs(/)",
        "The same as a share. Data sets and outputs mounted elsewhere are not in it.",
        "같은 값의 비율. 다른 곳에 마운트된 데이터와 출력은 들어 있지 않다.",
    ),
    Series(
        "rootfs_available_megabytes",
        "MB",
        ROOTFS,
        "psutil: statvfs(/)",
        "Space that is left at /.",
        "/에 남은 공간.",
    ),
    Series(
        "network_receive_megabytes",
        "MB",
        POD,
        "psutil: /proc/net/dev",
        "Received since the monitor started; it only grows. Its slope is the rate.",
        "모니터 시작 이후 받은 양. 늘기만 하며, 기울기가 속도다.",
    ),
    Series(
        "network_transmit_megabytes",
        "MB",
        POD,
        "psutil: /proc/net/dev",
        "Sent since the monitor started; it only grows.",
        "모니터 시작 이후 보낸 양. 늘기만 한다.",
    ),
    Series(
        "gpu_<i>_utilization_percentage",
        "%",
        GPU,
        "NVML",
        "Share of time in which some kernel was resident: not efficiency. 100 % can be slow.",
        "커널이 하나라도 올라가 있던 시간의 비율. 효율이 아니며, 100 %여도 느릴 수 있다.",
    ),
    Series(
        "gpu_<i>_memory_usage_megabytes",
        "MB",
        GPU,
        "NVML",
        "Allocated on the GPU, with the driver's reserve; frameworks hold more than they use.",
        "드라이버 예약분을 포함한 GPU 메모리 할당량. 프레임워크는 쓰는 것보다 더 잡는다.",
    ),
    Series(
        "gpu_<i>_memory_usage_percentage",
        "%",
        GPU,
        "NVML",
        "The same, of the GPU's memory.",
        "같은 값의 GPU 메모리 대비 비율.",
    ),
    Series(
        "gpu_<i>_power_usage_watts",
        "W",
        GPU,
        "NVML",
        "Power draw. It says more about real work than utilization does.",
        "소비 전력. 사용률보다 실제 일의 양을 더 잘 말해 준다.",
    ),
    Series(
        "gpu_<i>_power_usage_percentage",
        "%",
        GPU,
        "NVML",
        "Power draw of the enforced limit.",
        "적용된 전력 한도 대비 소비 전력.",
    ),
    Series(
        "gpu_<i>_temperature_celsius",
        "°C",
        GPU,
        "NVML",
        "Temperature of the chip. Near its limit the clock falls.",
        "칩 온도. 한계에 가까워지면 클럭이 내려간다.",
    ),
    Series(
        "container_memory_usage_megabytes",
        "MB",
        CONTAINER,
        "memory.current − inactive_file (v1: usage_in_bytes − total_inactive_file)",
        "Working set, as the kubelet and Grafana count it; file cache read twice is in it.",
        "kubelet과 Grafana가 세는 워킹 셋. 두 번 읽은 파일 캐시도 들어 있다.",
    ),
    Series(
        "container_memory_usage_percentage",
        "%",
        CONTAINER,
        "the same, of the memory limit",
        "May stay near 100 % for hours without danger: cache is given back before any kill.",
        "몇 시간 동안 100 % 가까이 있어도 위험하지 않을 수 있다. 캐시는 죽이기 전에 먼저 반환된다.",
        "memory",
    ),
    Series(
        "container_memory_unreclaimable_megabytes",
        "MB",
        CONTAINER,
        "memory.stat: anon + shmem + kernel − slab_reclaimable (v1: total_rss + total_shmem)",
        "What the kernel cannot give back. Judge the risk of OOM by this one.",
        "커널이 되돌려받을 수 없는 메모리. OOM 위험은 이 값으로 판단한다.",
    ),
    Series(
        "container_memory_unreclaimable_percentage",
        "%",
        CONTAINER,
        "the same, of the memory limit",
        "At 100 % something is killed. Plan to stay below 90 %.",
        "100 %가 되면 프로세스가 죽는다. 90 % 아래로 계획한다.",
        "memory",
    ),
    Series(
        "container_memory_pressure_percentage",
        "%",
        CONTAINER,
        "memory.pressure (v2, PSI): some",
        "Share of time in which some task waited for memory. Above 10 % training is slowed.",
        "어떤 태스크가 메모리를 기다린 시간의 비율. 10 %를 넘으면 학습이 느려진다.",
        "psi",
    ),
    Series(
        "container_cpu_utilization_percentage",
        "%",
        CONTAINER,
        "cpu.stat: usage_usec (v1: cpuacct.usage), of the quota",
        "CPU time of the container, of its quota.",
        "쿼터 대비 컨테이너의 CPU 시간.",
        "cpu",
    ),
    Series(
        "container_cpu_throttled_percentage",
        "%",
        CONTAINER,
        "cpu.stat: nr_throttled of nr_periods",
        "Share of periods in which the quota stopped the container: data loaders wait, GPUs idle.",
        "쿼터 때문에 멈춘 주기의 비율. 데이터 로더가 기다리고 GPU가 논다.",
        "cpu",
    ),
)


def expected(*, gpus: int, memory: bool, cpu: bool, psi: bool, node: bool = True) -> list[Series]:
    """The series of one collector under these conditions, GPUs spelled out."""
    has = {"": True, "memory": memory, "cpu": cpu, "psi": memory and psi}
    wanted = {NODE: node, ROOTFS: node, CONTAINER: memory or cpu, GPU: False, POD: True}
    found = [s for s in SERIES if wanted[s.scope] and has[s.needs]]
    per_gpu = [s for s in SERIES if s.scope == GPU]
    return found + [
        s._replace(name=s.name.replace("<i>", str(i))) for i in range(gpus) for s in per_gpu
    ]
