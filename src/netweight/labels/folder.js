// Sorts the table by the column whose heading was clicked; numbers by size, texts by letters, empty cells last.
const table = document.getElementById("labels");
table.querySelectorAll("thead th").forEach((heading, column) => heading.addEventListener("click", () => {
  const up = heading.getAttribute("aria-sort") !== "ascending";
  table.querySelectorAll("thead th").forEach(other => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = row => row.children[column].dataset.value;
  const rows = [...table.tBodies[0].rows];
  const numeric = rows.every(row => value(row) === "" || !isNaN(value(row)));
  rows.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    return (numeric ? x - y : x.localeCompare(y)) * (up ? 1 : -1);
  });
  table.tBodies[0].append(...rows);
}));
