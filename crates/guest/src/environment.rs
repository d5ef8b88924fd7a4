//! What a command finds in its environment, and where its program is looked for.
//!
//! Later wins: what the account implies, then the way out, then what the sandbox was configured with, then what the command
//! asks for.

use std::collections::BTreeMap;
use std::ffi::CString;

use crate::failure::{Outcome, invalid, show};
use crate::users::Account;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[derive(Debug)]
pub(crate) struct Environment(BTreeMap<String, String>);

impl Environment {
    pub(crate) fn new(account: &Account, layers: [&[(String, String)]; 3], terminal: bool) -> Outcome<Self> {
        let mut all = BTreeMap::new();
        let mut put = |name: &str, value: &str| all.insert(name.to_owned(), value.to_owned());
        put("PATH", DEFAULT_PATH);
        put("HOME", &account.home);
        put("USER", &account.name);
        put("LOGNAME", &account.name);
        put("SHELL", &account.shell);
        if terminal {
            put("TERM", "xterm-256color");
        }
        for (name, value) in layers.into_iter().flatten() {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                return Err(invalid(format!(
                    "not a usable environment variable: {:?}",
                    name.chars().take(80).collect::<String>()
                )));
            }
            put(name, value);
        }
        Ok(Self(all))
    }

    /// As the program gets it when it starts in `directory`, which `PWD` follows unless someone set it.
    pub(crate) fn strings(&self, directory: &[u8]) -> Vec<CString> {
        let own = self
            .0
            .iter()
            .map(|(name, value)| format!("{name}={value}").into_bytes());
        let implied = (!self.0.contains_key("PWD")).then(|| [b"PWD=", directory].concat());
        own.chain(implied)
            .filter_map(|string| CString::new(string).ok())
            .collect()
    }

    /// Every file that `program` may mean, in the order in which to try them.
    pub(crate) fn candidates(&self, program: &[u8]) -> Outcome<Vec<CString>> {
        let path = |bytes: Vec<u8>| {
            CString::new(bytes).map_err(|_| invalid("the program's name contains a zero byte"))
        };
        if program.is_empty() {
            return Err(invalid("the program's name is empty"));
        }
        if program.contains(&b'/') {
            return Ok(vec![path(program.to_vec())?]);
        }
        if program.len() > 255 {
            return Err(invalid(format!(
                "the program's name is too long: {}...",
                show(&program[..80])
            )));
        }
        let search = self.0.get("PATH").map_or(DEFAULT_PATH, String::as_str);
        search
            .split(':')
            .take(256)
            .map(|directory| {
                let directory = if directory.is_empty() { "." } else { directory };
                path([directory.as_bytes(), b"/", program].concat())
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> Account {
        Account {
            name: "user".to_owned(),
            uid: 1000,
            gid: 1000,
            groups: vec![1000],
            home: "/home/user".to_owned(),
            shell: "/bin/bash".to_owned(),
        }
    }

    fn pair(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
    }

    #[test]
    fn later_wins() {
        let environment = Environment::new(
            &account(),
            [
                &[pair("A", "network"), pair("B", "network")],
                &[pair("A", "configured"), pair("HOME", "/elsewhere")],
                &[pair("A", "own")],
            ],
            true,
        )
        .expect("valid");
        let strings: Vec<String> = environment
            .strings(b"/srv")
            .into_iter()
            .map(|string| string.into_string().expect("text"))
            .collect();
        assert_eq!(
            strings,
            [
                "A=own",
                "B=network",
                "HOME=/elsewhere",
                "LOGNAME=user",
                &format!("PATH={DEFAULT_PATH}"),
                "SHELL=/bin/bash",
                "TERM=xterm-256color",
                "USER=user",
                "PWD=/srv"
            ]
        );
    }

    #[test]
    fn impossible_names_are_refused() {
        for name in ["", "A=B", "A\0"] {
            assert!(Environment::new(&account(), [&[], &[], &[pair(name, "x")]], false).is_err());
        }
    }

    #[test]
    fn programs_are_looked_for_in_the_commands_path() {
        let environment =
            Environment::new(&account(), [&[], &[], &[pair("PATH", "/a::/b")]], false).expect("valid");
        let found = environment.candidates(b"x").expect("valid");
        assert_eq!(found, [c"/a/x".to_owned(), c"./x".to_owned(), c"/b/x".to_owned()]);
        assert_eq!(
            environment.candidates(b"./x").expect("valid"),
            [c"./x".to_owned()]
        );
        assert!(environment.candidates(b"").is_err());
    }
}
