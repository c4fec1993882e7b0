import sys, time, warnings
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh, DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, Partial, distribute_tensor
import ckptman, ckptman.sharded.api as api

def lim(): 
    warnings.simplefilter("ignore"); api.TIMEOUT_SECONDS = 8

def hsdp(zero=False):
    m = init_device_mesh("cpu", (2,2))
    w = torch.arange(40000.).reshape(400,100) * (not zero)
    return {"w": distribute_tensor(w, m, [Replicate(), Shard(0)], src_data_rank=None)}

def uneven_groups(root):
    lim()
    dist.new_group([0])
    s = hsdp(); ckptman.save(s, root+"/x")
    t=time.time()
    f = hsdp(True)
    try: ckptman.load(f, root+"/x")
    except BaseException as e: return f"{type(e).__name__} {str(e)[:150]} {time.time()-t:.1f}"
    return torch.equal(f["w"].to_local(), s["w"].to_local()), time.time()-t

def twice(root):
    lim()
    s = hsdp(); ckptman.save(s, root+"/x")
    for _ in range(3):
        f = hsdp(True); ckptman.load(f, root+"/x")
    return "ok"

def fsave(root):
    lim()
    m = init_device_mesh("cpu", (2,))
    s = {n: distribute_tensor(torch.arange(20000.).reshape(200,100), m, [Shard(0)], src_data_rank=None) for n in "ab"}
    if dist.get_rank()==0: s["c"]=torch.arange(40000.)
    dcp.save(s, checkpoint_id=root+"/f")
    dist.barrier()
    if dist.get_rank()==0: (Path(root)/"f"/"__1_0.distcp").unlink()
    dist.barrier()

def foreign_missing(root):
    fsave(root)
    t=time.time()
    # replicas: family of both ranks; c first then a,b
    f = {"a": torch.zeros(200,100), "c": torch.zeros(40000)} 
    try: ckptman.load(f, root+"/f")
    except BaseException as e: return f"{type(e).__name__} {str(e)[:150]} {time.time()-t:.1f}"
    return "loaded"

def quant(root):
    lim()
    q = torch.quantize_per_tensor(torch.linspace(-3,3,10000), 0.125, 3, torch.qint8)
    ckptman.save({"q": q}, root+"/q")
    f = {"q": torch.quantize_per_tensor(torch.zeros(10000), 0.125, 3, torch.qint8)}
    t=time.time()
    out=[]
    for how in ("dcp","ckptman"):
        try:
            if how=="dcp": dcp.load(f, checkpoint_id=root+"/q")
            else: ckptman.load(f, root+"/q")
        except BaseException as e: out.append(f"{how} {type(e).__name__} {str(e)[:300]} {time.time()-t:.1f}"); continue
        out.append((how, torch.equal(f["q"].int_repr(), q.int_repr())))
    return out

def some_dtensor(root):
    lim()
    m = init_device_mesh("cpu", (2,))
    s = {"w": distribute_tensor(torch.arange(1000000.).reshape(1000,1000), m, [Replicate()], src_data_rank=None)}
    if dist.get_rank()==0: s["x"] = distribute_tensor(torch.arange(2000000.).reshape(2000,1000), m, [Replicate()], src_data_rank=None)
    out=[]
    for how in ("dcp","ckptman"):
        t=time.time()
        try:
            if how=="dcp": dcp.save(s, checkpoint_id=root+"/d")
            else: ckptman.save(s, root+"/c")
        except BaseException as e: out.append(f"{how} {type(e).__name__} {str(e)[:300]} {time.time()-t:.1f}"); continue
        out.append(how)
    return out

def partial(root):
    lim()
    t=time.time()
    s={"y": torch.ones(3)}
    m = DeviceMesh("cpu", [1])
    if dist.get_rank()==1: s["x"] = DTensor.from_local(torch.ones(3), m, [Partial()])
    try: ckptman.save(s, root+"/c")
    except BaseException as e: return f"{type(e).__name__} {str(e)[:150]} {time.time()-t:.1f}"

def conj(root):
    lim()
    x = torch.complex(torch.randn(100,100),torch.randn(100,100)); dist.broadcast(torch.view_as_real(x),0)
    ckptman.save({"x": x}, root+"/x")
    t=time.time()
    f={"x": torch.zeros(100,100,dtype=torch.complex64).conj()}
    try: ckptman.load(f, root+"/x")
    except BaseException as e: return f"{type(e).__name__} {str(e)[:150]} {time.time()-t:.1f}"
    return torch.equal(f["x"],x)

if __name__ == "__main__":
    import tempfile
    from tests.ranks import run_ranks
    import tests._probe_tmp as me
    for name, n in [("uneven_groups",4),("twice",4),("foreign_missing",2),("quant",2),("some_dtensor",2),("partial",2),("conj",2)]:
        with tempfile.TemporaryDirectory() as d:
            try: print(name, run_ranks(n, getattr(me,name), d, limit=40))
            except BaseException as e: print(name, "FAILED", str(e)[-600:])

def fm2(root):
    fsave(root)
    import traceback
    f = {"a": torch.zeros(200,100), "c": torch.zeros(40000)} 
    try: ckptman.load(f, root+"/f")
    except BaseException as e: return traceback.format_exc()[-3500:]
def q1(root):
    lim(); import faulthandler; faulthandler.enable()
    q = torch.quantize_per_tensor(torch.linspace(-3,3,10000), 0.125, 3, torch.qint8)
    ckptman.save({"q": q}, root+"/q")
    f = {"q": torch.quantize_per_tensor(torch.zeros(10000), 0.125, 3, torch.qint8)}
    dcp.load(f, checkpoint_id=root+"/q")
    print("dcp ok", torch.equal(f["q"].int_repr(), q.int_repr()), flush=True)
    ckptman.load(f, root+"/q")
