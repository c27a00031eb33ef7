//! What a record holds that this release does not know, so that it survives being written again.

use serde_json::Value;

/// Members of a JSON document, each with the way to it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Extra(Vec<(Vec<String>, Value)>);

impl Extra {
    /// What one document has that another does not.
    pub fn between(all: &Value, known: &Value) -> Self {
        let mut found = Self::default();
        found.gather(all, known, &mut Vec::new());
        found
    }

    fn gather(&mut self, all: &Value, known: &Value, path: &mut Vec<String>) {
        let (Value::Object(all), Value::Object(known)) = (all, known) else { return };
        for (name, value) in all {
            path.push(name.clone());
            match known.get(name) {
                None => self.0.push((path.clone(), value.clone())),
                Some(known) => self.gather(value, known, path),
            }
            path.pop();
        }
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Puts everything back into a document, as far as what it was a member of is still there.
    pub fn restore(&self, document: &mut Value) {
        for (path, value) in &self.0 {
            let Some((name, above)) = path.split_last() else { continue };
            let parent = above.iter().try_fold(&mut *document, |at, name| at.get_mut(name));
            if let Some(Value::Object(parent)) = parent {
                parent.entry(name).or_insert_with(|| value.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_not_known_comes_back_and_goes_with_what_it_was_a_member_of() {
        let known = json!({"name": "n", "inventories": {"VCPU": {"total": 4}, "DISK_GB": {"total": 1}}});
        let mut all = known.clone();
        all["color"] = json!({"deep": [1, 2]});
        all["inventories"]["VCPU"]["pinned"] = json!(true);
        let extra = Extra::between(&all, &known);
        let mut again = known.clone();
        extra.restore(&mut again);
        assert_eq!(again, all);
        let mut without = json!({"name": "m"});
        extra.restore(&mut without);
        assert_eq!(without, json!({"name": "m", "color": {"deep": [1, 2]}}));
        assert!(Extra::between(&known, &known).is_empty());
    }
}
