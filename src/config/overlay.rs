//! `--set key=value`, laid over the values of the file.

use toml::{Table, Value};

use crate::error::ConfigError;

use super::locate::Origins;

/// Sets one key. The value is read as TOML, and as a string where it is none, so that
/// `--set cache.mode=paged` needs no quotes. An empty value takes the key out, as if the file did
/// not have it.
pub(super) fn set(
    table: &mut Table,
    origins: &mut Origins,
    argument: &str,
) -> Result<(), ConfigError> {
    let refused =
        |problem: String| ConfigError::Override { argument: argument.to_owned(), problem };
    let (key, text) = argument.split_once('=').ok_or_else(|| refused("has no =".to_owned()))?;
    let parts: Vec<&str> = key.split('.').map(str::trim).collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(refused("the key has an empty part".to_owned()));
    }
    let text = text.trim();
    if text.is_empty() {
        remove(table, &parts).map_err(refused)?;
        origins.take_out(&parts.join("."));
        return Ok(());
    }
    let value = text.parse().unwrap_or_else(|_| Value::String(text.to_owned()));

    let mut root = Value::Table(std::mem::take(table));
    let placed = place(&mut root, &parts, value, origins);
    if let Value::Table(changed) = root {
        *table = changed;
    }
    placed.map_err(refused)
}

/// Takes out what the parts of the key lead to.
fn remove(table: &mut Table, parts: &[&str]) -> Result<(), String> {
    let Some((last, way)) = parts.split_last() else { return Ok(()) };
    let missing = || format!("{} is not set, so it cannot be taken out", parts.join("."));
    let mut at = table;
    for part in way {
        at = match at.get_mut(*part) {
            Some(Value::Table(next)) => next,
            _ => return Err(missing()),
        };
    }
    at.remove(*last).map(|_| ()).ok_or_else(missing)
}

/// Puts the value where the parts of the key lead, making tables and lists that are not there.
fn place(
    root: &mut Value,
    parts: &[&str],
    value: Value,
    origins: &mut Origins,
) -> Result<(), String> {
    let mut at = root;
    let mut walked = String::new();
    for (depth, part) in parts.iter().enumerate() {
        let next_is_index = parts.get(depth + 1).is_some_and(|next| next.parse::<usize>().is_ok());
        let fresh = || {
            if next_is_index { Value::Array(Vec::new()) } else { Value::Table(Table::new()) }
        };
        let (slot, made) = child(at, part, &walked, fresh)?;
        if depth > 0 {
            walked.push('.');
        }
        walked.push_str(part);
        if made {
            origins.override_key(&walked);
        }
        at = slot;
    }
    *at = value;
    origins.override_key(&walked);
    Ok(())
}

/// The entry of a table or list, and whether it had to be made.
fn child<'a>(
    parent: &'a mut Value,
    part: &str,
    parent_key: &str,
    fresh: impl FnOnce() -> Value,
) -> Result<(&'a mut Value, bool), String> {
    match parent {
        Value::Table(table) => {
            let made = !table.contains_key(part);
            Ok((table.entry(part).or_insert_with(fresh), made))
        }
        Value::Array(list) => {
            let len = list.len();
            let index: usize = part
                .parse()
                .map_err(|_| format!("{parent_key} is a list, and {part:?} is no index of it"))?;
            if index > len {
                return Err(format!(
                    "{parent_key} has {len} entries, so {index} would leave a gap"
                ));
            }
            if index == len {
                list.push(fresh());
            }
            Ok((&mut list[index], index == len))
        }
        other => Err(format!("{parent_key} is {}, not a table", describe(other))),
    }
}

/// A TOML value in words.
pub(super) fn describe(value: &Value) -> String {
    /// Longer strings are cut: they go into a message of one line.
    const SHOWN: usize = 60;
    match value {
        Value::String(text) if text.chars().count() > SHOWN => {
            let start: String = text.chars().take(SHOWN).collect();
            format!("the string {start:?}…")
        }
        Value::String(text) => format!("the string {text:?}"),
        Value::Integer(number) => format!("the integer {number}"),
        Value::Float(number) => format!("the float {number:?}"),
        Value::Boolean(flag) => format!("{flag}"),
        Value::Datetime(moment) => format!("the date {moment}"),
        Value::Array(_) => "a list".to_owned(),
        Value::Table(_) => "a table".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::error::Origin;

    use super::super::locate;
    use super::*;

    const TEXT: &str = "[limits]\nmax_seqs = 4\n[[variant]]\nname = 'a'\n";

    fn after(arguments: &[&str]) -> Result<(Table, Origins), ConfigError> {
        let (mut table, mut origins) = locate::read(TEXT, Path::new("t.toml"))?;
        for argument in arguments {
            set(&mut table, &mut origins, argument)?;
        }
        Ok((table, origins))
    }

    #[test]
    fn values_are_toml_or_else_strings() {
        let (table, origins) = after(&[
            "limits.max_seqs=8",
            "cache.mode=paged",
            "pool.capacity = budget:24 GiB",
            "variant.0.threads=2",
            "variant.1.name=b",
            "cache.int8={ scale = 'per-tensor' }",
            "model.attention_window=[4, 0]",
        ])
        .unwrap();
        let expected = "
            limits.max_seqs = 8
            variant = [{ name = 'a', threads = 2 }, { name = 'b' }]
            cache = { mode = 'paged', int8 = { scale = 'per-tensor' } }
            pool.capacity = 'budget:24 GiB'
            model.attention_window = [4, 0]
        ";
        assert_eq!(table, expected.parse::<Table>().unwrap());
        for key in ["limits.max_seqs", "cache", "cache.mode", "variant.1", "cache.int8.scale"] {
            assert_eq!(origins.of(key), Origin::Override, "{key}");
        }
        for (key, line) in [("limits", 1), ("variant.0.name", 4)] {
            let path = Path::new("t.toml").to_owned();
            assert_eq!(origins.of(key), Origin::File { path, line });
        }
    }

    #[test]
    fn arguments_that_lead_nowhere_are_refused() {
        for (argument, problem) in [
            ("limits.max_seqs", "has no ="),
            ("=8", "the key has an empty part"),
            ("limits..max_seqs=8", "the key has an empty part"),
            ("limits.max_seqs.x=8", "limits.max_seqs is the integer 4, not a table"),
            ("variant.a.mode=paged", "variant is a list, and \"a\" is no index of it"),
            ("variant.2.mode=paged", "variant has 1 entries, so 2 would leave a gap"),
        ] {
            let error = after(&[argument]).unwrap_err().to_string();
            let start = format!("--set {argument:?}: {problem}; write --set key=value");
            assert!(error.starts_with(&start), "{error}");
        }
    }

    #[test]
    fn an_empty_value_takes_a_key_out() {
        let text = "a = 1\n[b]\nc = 2\nd = 3\n";
        let (mut table, mut origins) = locate::read(text, Path::new("x.toml")).unwrap();
        set(&mut table, &mut origins, "b.c=").unwrap();
        assert_eq!(table.to_string(), "a = 1\n\n[b]\nd = 3\n");
        for missing in ["b.c=", "e=", "a.b="] {
            let error = set(&mut table, &mut origins, missing).unwrap_err().to_string();
            assert!(error.contains("is not set"), "{error}");
        }
    }
}
