//! A terminal with a program in it, and a test in front of it.

use parking_lot::Mutex;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::wait;

/// Nothing that a person waits for at a terminal takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct Terminal {
    keyboard: File,
    /// All that was ever shown.
    shown: Arc<Mutex<Vec<u8>>>,
    child: Child,
}

impl Terminal {
    /// Starts a program whose stdin, stdout and stderr are a terminal of this size.
    pub fn start(mut command: Command, rows: u16, cols: u16) -> Self {
        let ours =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
        grantpt(&ours).expect("a terminal of ours");
        unlockpt(&ours).expect("a terminal of ours");
        let size = Winsize {
            ws_row: rows,
            ws_col: cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&ours, size).expect("a terminal has a size");
        let name = ptsname(&ours, Vec::new()).expect("a terminal has a name");
        let theirs = File::options()
            .read(true)
            .write(true)
            .open(name.to_str().expect("a path"))
            .expect("the other side opens");
        let side = || theirs.try_clone().expect("a descriptor");
        let child = command
            .stdin(side())
            .stdout(side())
            .stderr(side())
            .spawn()
            .expect("the program runs");
        let keyboard = File::from(ours);
        let mut screen = keyboard.try_clone().expect("a descriptor");
        let shown = Arc::new(Mutex::new(Vec::new()));
        let showing = Arc::clone(&shown);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // Ends with an error when nobody has the other side open any more.
            while let Ok(count @ 1..) = screen.read(&mut buffer) {
                let mut shown = showing.lock();
                shown.extend_from_slice(&buffer[..count]);
            }
        });
        Self {
            keyboard,
            shown,
            child,
        }
    }

    pub fn press(&mut self, keys: &str) {
        self.keyboard
            .write_all(keys.as_bytes())
            .expect("a terminal takes keys");
    }

    pub fn shown(&self) -> String {
        let shown = self.shown.lock();
        String::from_utf8_lossy(&shown).into_owned()
    }

    /// Waits until this was shown.
    pub async fn until(&self, text: &str) {
        self.until_times(text, 1).await;
    }

    /// Waits until this was shown so many times.
    pub async fn until_times(&self, text: &str, times: usize) {
        let shown = wait::becomes_true(PATIENCE, || self.shown().matches(text).count() >= times);
        assert!(shown, "not {times} times {text:?} in {:?}", self.shown());
    }

    /// Whether keys go to the program one by one, unseen: not gathered into lines, not shown by the terminal itself.
    pub fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.keyboard)
            .expect("a terminal has modes")
            .local_modes;
        !modes.intersects(LocalModes::ICANON | LocalModes::ECHO)
    }

    /// Waits until the program has ended.
    pub async fn ended(&mut self) -> ExitStatus {
        let child = &mut self.child;
        wait::until_sync("the program ends", PATIENCE, || {
            child.try_wait().expect("a child can be waited for")
        })
        .await
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}
