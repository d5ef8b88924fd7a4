//! The table: doors below each other, credentials beside each other, in Markdown.

use std::fmt;

const BEGIN: &str = "<!-- what opens what -->";
const END: &str = "<!-- end of what opens what -->";

#[derive(Debug, Default)]
pub(crate) struct Table {
    columns: Vec<String>,
    rows: Vec<(String, Vec<String>)>,
}

impl Table {
    pub(crate) fn new(columns: impl Iterator<Item = String>) -> Self {
        Self {
            columns: columns.collect(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, door: &str, cells: Vec<String>) {
        assert_eq!(cells.len(), self.columns.len(), "{door}");
        self.rows.push((door.to_owned(), cells));
    }

    /// The one between the marks of a page.
    pub(crate) fn of_page(page: &str) -> Self {
        let (_, rest) = page.split_once(BEGIN).expect("the page has the table");
        let (text, _) = rest.split_once(END).expect("the table has an end");
        let mut lines = text.lines().map(str::trim).filter(|line| line.starts_with('|'));
        let cells = |line: &str| -> Vec<String> {
            let inner = line.trim_matches('|');
            inner.split('|').map(|cell| cell.trim().to_owned()).collect()
        };
        let head = lines.next().map(cells).unwrap_or_default();
        let mut table = Self::new(head.into_iter().skip(1));
        for line in lines.skip(1) {
            let mut row = cells(line);
            let door = row.remove(0);
            table.push(&door, row);
        }
        table
    }

    /// Every cell in which the other one is different, with what both say.
    pub(crate) fn differences(&self, found: &Self) -> Vec<String> {
        let mut all = Vec::new();
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for table in [self, found] {
            for (door, _) in &table.rows {
                for column in &table.columns {
                    if !pairs.contains(&(door, column)) {
                        pairs.push((door, column));
                    }
                }
            }
        }
        for (door, column) in pairs {
            let (said, did) = (self.cell(door, column), found.cell(door, column));
            if said != did {
                let shown = |cell: Option<&str>| cell.unwrap_or("nothing").to_owned();
                all.push(format!(
                    "`{column}` at `{door}`: the page says {}, the server {}",
                    shown(said),
                    shown(did)
                ));
            }
        }
        all
    }

    fn cell(&self, door: &str, column: &str) -> Option<&str> {
        let at = self.columns.iter().position(|known| known == column)?;
        let (_, cells) = self.rows.iter().find(|(known, _)| known == door)?;
        Some(&cells[at])
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |first: &str, cells: &[String]| format!("| {first} | {} |", cells.join(" | "));
        writeln!(f, "{}", line("door", &self.columns))?;
        writeln!(f, "|---|{}", "---|".repeat(self.columns.len()))?;
        for (door, cells) in &self.rows {
            writeln!(f, "{}", line(door, cells))?;
        }
        Ok(())
    }
}

#[test]
fn a_cell_that_differs_is_told_with_both() {
    let page = format!("{BEGIN}\n| door | none | key |\n|---|---|---|\n| read | 401 | yes |\n{END}");
    let expected = Table::of_page(&page);
    let mut found = Table::new(["none".to_owned(), "key".to_owned()].into_iter());
    found.push("read", vec!["yes".into(), "yes".into()]);
    found.push("write", vec!["401".into(), "yes".into()]);
    assert_eq!(
        expected.differences(&found),
        [
            "`none` at `read`: the page says 401, the server yes",
            "`none` at `write`: the page says nothing, the server 401",
            "`key` at `write`: the page says nothing, the server yes",
        ]
    );
    let again = Table::of_page(&format!("{BEGIN}\n{found}{END}"));
    assert!(again.differences(&found).is_empty());
}
