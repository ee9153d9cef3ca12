// Marks the passes and transfers that a search asks for: a micro-batch's number, a name, or a kernel inside of passes.
const wanted = cb_obj.value_input.trim().toLowerCase()
const marked = {left: [], right: [], top: [], bottom: []}
if (wanted !== "") {
  const number = /^\d+$/.test(wanted) ? Number(wanted) : null
  const texts = new Set()
  inside.texts.forEach((text, code) => { if (text.toLowerCase().includes(wanted)) texts.add(code) })
  const templates = new Set()
  for (let template = 0; template + 1 < inside.first_op.length; template++)
    for (let op = inside.first_op[template]; op < inside.first_op[template + 1]; op++)
      if (texts.has(inside.op_name[op]) || texts.has(inside.op_kind[op])) templates.add(template)
  const named = (columns, index) => columns.name[index].toLowerCase().split(/[ :]/).includes(wanted)
    || (wanted.length > 2 && columns.name[index].toLowerCase().includes(wanted))
  const has_kernel = (box) => {
    for (let piece = inside.first_piece[box]; piece < inside.first_piece[box + 1]; piece++)
      if (templates.has(inside.template[piece])) return true
    return false
  }
  const mark = (columns, fits) => {
    for (let index = 0; index < columns.left.length; index++)
      if (number === null ? fits(index) : columns.microbatch[index] === number)
        for (const side of ["left", "right", "top", "bottom"]) marked[side].push(columns[side][index])
  }
  mark(boxes.data, (index) => named(boxes.data, index) || has_kernel(index))
  mark(bars.data, (index) => named(bars.data, index))
}
source.data = marked
const count = marked.left.length
result.text = wanted === "" ? "" : count === 0 ? "nothing found" : `${count.toLocaleString("en")} marked`
