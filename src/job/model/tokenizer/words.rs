//! Cuts a text into words before their bytes are merged.

use regex::Regex;

/// How a text is cut, by the name that GGUF has for it.
#[derive(Debug)]
pub(super) struct WordPattern {
    /// Digits stand alone before anything else is done.
    lone_digits: bool,
    words: Regex,
}

/// GPT-2's, without its last part: `\s+(?!\S)`, which needs to look ahead.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

impl WordPattern {
    /// The pattern of a name; `None` for those that are not known here.
    pub(super) fn named(name: &str) -> Option<Self> {
        let lone_digits = match name {
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" => true,
            "gpt-2" | "gpt2" | "default" => false,
            _ => return None,
        };
        Some(Self { lone_digits, words: Regex::new(GPT2).ok()? })
    }

    /// The words of a text; together they are the text.
    pub(super) fn words<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut words = Vec::new();
        if !self.lone_digits {
            self.cut(text, &mut words);
            return words;
        }
        let mut from = 0;
        for (at, digit) in text.char_indices().filter(|(_, c)| c.is_numeric()) {
            self.cut(&text[from..at], &mut words);
            from = at + digit.len_utf8();
            words.push(&text[at..from]);
        }
        self.cut(&text[from..], &mut words);
        words
    }

    fn cut<'t>(&self, text: &'t str, words: &mut Vec<&'t str>) {
        let mut at = 0;
        while let Some(found) = self.words.find_at(text, at) {
            let word = found.as_str();
            at = found.end();
            let last = word.chars().next_back();
            if at < text.len()
                && let Some(last) = last.filter(|_| word.chars().all(char::is_whitespace))
                && word.len() > last.len_utf8()
            {
                // Blanks before a word leave it the last one.
                at -= last.len_utf8();
            }
            words.push(&text[found.start()..at]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_gpt_2() {
        let gpt2 = WordPattern::named("gpt-2").unwrap();
        for (text, words) in [
            ("", &[][..]),
            ("Hello world", &["Hello", " world"]),
            ("it's  two", &["it", "'s", " ", " two"]),
            ("a \n b", &["a", " \n", " b"]),
            ("end  ", &["end", "  "]),
            ("x=12 345!?", &["x", "=", "12", " 345", "!?"]),
            ("tab\tword", &["tab", "\t", "word"]),
            ("Grüße, 世界", &["Grüße", ",", " 世界"]),
        ] {
            assert_eq!(gpt2.words(text), words, "{text:?}");
            assert_eq!(gpt2.words(text).concat(), text);
        }
    }

    #[test]
    fn digits_stand_alone_where_the_model_was_trained_so() {
        let smollm = WordPattern::named("smollm").unwrap();
        assert_eq!(smollm.words("in 2024, 7"), ["in", " ", "2", "0", "2", "4", ",", " ", "7"]);
        assert!(WordPattern::named("something-else").is_none());
    }
}
