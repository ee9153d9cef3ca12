// Draws what a chosen pass consists of: its kernels and the communication between them, a row per lane.
const chosen = boxes.selected.indices
if (chosen.length === 0) return
const box = chosen[0]
const width = boxes.data.right[box] - boxes.data.left[box]
const ops = {line: [], left: [], right: [], lane: [], colour: [], name: [], kind: [], seconds: [], moved: [], flops: []}
const lanes = new Set()
let slowed = false
for (let piece = inside.first_piece[box]; piece < inside.first_piece[box + 1]; piece++) {
  const template = inside.template[piece], start = inside.start[piece], own = inside.own[piece]
  const first = inside.first_op[template], last = inside.first_op[template + 1]
  for (let op = first; op < last; op++) {
    let from = start + (own < 0 ? inside.op_start[op] : inside.own_start[own + op - first])
    let to = start + (own < 0 ? inside.op_end[op] : inside.own_end[own + op - first])
    if (last - first === 1) [from, to] = [start, inside.end[piece]]  // a transfer that the network timed
    else if (own === -2) slowed = true
    const lane = inside.texts[inside.op_lane[op]]
    lanes.add(lane)
    ops.line.push(0)
    ops.left.push(from * scale)
    ops.right.push(to * scale)
    ops.lane.push(lane)
    ops.colour.push(op_colours[inside.op_category[op]] || boxes.data.colour[box])
    ops.name.push(inside.texts[inside.op_name[op]])
    ops.kind.push(inside.texts[inside.op_kind[op]])
    ops.seconds.push((to - from) * unit_s)
    ops.moved.push(inside.op_bytes[op])
    ops.flops.push(inside.op_flops[op])
  }
}
const length = ops.right.reduce((a, b) => Math.max(a, b), 0)
figure.y_range.factors = Array.from(lanes).sort((a, b) => (a === "compute") - (b === "compute") || (a < b ? 1 : -1))
source.data = ops
figure.x_range.setv({start: 0, end: length, reset_start: 0, reset_end: length})
const seconds = width * unit_s
figure.title.text = `Inside ${boxes.data.name[box]} on ${rows[boxes.data.row[box]]}\n` +
  `${ops.name.length.toLocaleString("en")} kernels and transfers, ${format_seconds(seconds)}` + (slowed ? "; other work slowed it, and kernels are drawn as long as they take alone" : "")

function format_seconds(seconds) {
  const [size, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"]
  return `${(seconds / size).toFixed(2)} ${unit}`
}
