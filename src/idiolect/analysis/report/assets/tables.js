// Tables: sorted by a click on a heading, and handed out as text.

const SORTED = new Map(); // table id -> [column, descending]

function sortTable(table, column, descending) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, n) => {
    if (n === column) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
  const number = heads[column].classList.contains("number");
  const rows = [...body.rows].map((row) => {
    const cell = row.cells[column];
    const value = number ? parseFloat(cell.dataset.sort) : cell.textContent.trim();
    return { row, value };
  });
  rows.sort((a, b) => {
    if (!number) return a.value.localeCompare(b.value, undefined, { numeric: true }) * (descending ? -1 : 1);
    if (Number.isNaN(a.value) || Number.isNaN(b.value)) return Number.isNaN(a.value) - Number.isNaN(b.value); // nothing comes last
    return descending ? b.value - a.value : a.value - b.value;
  });
  rows.forEach(({ row }) => body.append(row));
  SORTED.set(table.id, [column, descending]);
}

function sortableTables(root) {
  root.querySelectorAll("table").forEach((table) => {
    const kept = SORTED.get(table.id);
    if (kept) sortTable(table, ...kept);
  });
}

// Tables wider than the window say so.
function scrollCues() {
  document.querySelectorAll(".scroll").forEach((box) => {
    box.classList.toggle("wider", box.scrollWidth > box.clientWidth + 4);
  });
}
window.addEventListener("resize", scrollCues);
document.addEventListener("toggle", scrollCues, true);
window.addEventListener("load", scrollCues);

document.addEventListener("click", (event) => {
  const button = event.target.closest("thead button");
  if (!button) return;
  const table = button.closest("table");
  const column = button.closest("th").cellIndex;
  const before = SORTED.get(table.id);
  // Figures start with the largest, words with the first.
  const first = button.closest("th").classList.contains("number");
  sortTable(table, column, before && before[0] === column ? !before[1] : first);
});

function handOut(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
