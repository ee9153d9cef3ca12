// Draws the white lines around those boxes that stay visible between them, however it is zoomed.
const {left, right, line} = source.data
const pixels = figure.inner_width / (figure.x_range.end - figure.x_range.start)
let changed = false
for (let box = 0; box < line.length; box++) {
  const width = (right[box] - left[box]) * pixels > 4 ? line_width : 0
  if (line[box] === width) continue
  line[box] = width
  changed = true
}
if (changed) source.change.emit()
