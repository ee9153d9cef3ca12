"""What a training run leaves behind: ``DIR/NAME.json`` and, where it went well, ``DIR/NAME.timeline.csv.gz``.

NAME is the workload's. The JSON's keys; seconds, bytes, and FLOP/s throughout:

```
format            1
name              the workload's name
status            ok | failed | skipped; of a failed or skipped run no keys but format, name, status, reason, date, command,
                  workload and, where it got so far, environment are sure to be there
reason            why it failed or was skipped, else ""
date, command     UTC, ISO 8601, when the run began; as typed, without paths
workload          {text: the file as it was, resolved: the whole `Workload` as plain data, sha256: of the text}
environment       see `calibration.measure.gpu.environment`: gpu, cuda, nccl, nvls, torch, nvidia_smi (driver), topology, ...
n_gpus            ranks
tokens_per_step   of the whole job
steps             {warm_up, timed, profiled}: how many of each were done, in this order
step_time_s       {median, p10, p90, min, max, spread, each: [..]} over the timed steps, of each the slowest rank's
                  (between events on its stream); spread = (p90 - p10) / median
wall_time_s       the same by the host's clock
tokens_per_s      tokens_per_step / step_time_s.median
loss              mean loss of every step, from the first of warm-up on
ranks             a list, one per rank in order:
  rank, place     place: {tp, dp, pp, ep}, its coordinates
  step_time_s, wall_time_s   {median, p10, p90, min, max, spread, each}, of this rank
  memory          {steady_allocated_bytes, peak_allocated_bytes, peak_reserved_bytes, first_step_peak_allocated_bytes}:
                  torch.cuda.max_memory_allocated over the timed steps and over all steps, reserved over all, and
                  the peak of the first step (when the optimizer's state is made); empty without GPUs
  clocks          {sm_mhz: {median, min, max}, power_w: {..}, temp_c: {..}, throttle: [reasons seen]} while timed;
                  empty without NVML
  profile         of the one profiled step kept, the last: {span_s (first start to last end on the GPU), busy_s (some kernel runs),
                  exposed_s (communication runs and no other kernel), exposed: {kind: s}, step_s (wall, under the profiler)}
  kernels         a list: {class, kind, op, seconds, launches} of the profiled step, where class is matmul | attention | memory |
                  optimizer | communication | copy, kind is tp | dp | pp | ep of communication, else "", and op is the collective
                  (all_reduce, all_gather, reduce_scatter, all_to_all, send_recv, broadcast) of communication, else "".
                  What runs inside the optimizer's step is of class optimizer, its communication excepted; copy is what
                  copy engines do (memcpy between host and device)
```

The timeline is the profiled step of every rank, in columns rank, stream (compute | comm, numbered where there are several), class, kind,
name (the kernel's, cut to 80 characters), start_s, end_s: from the earliest kernel of any rank, by the clocks of one host.
Without GPUs spans are of ops on the CPU.
"""
