//! Carries out a Dockerfile: stages in order, each a chain of states.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use atoll_types::{NetworkPolicy, TemplateManifest, TemplateSource};
use sha2::{Digest, Sha256};

use super::copy::{self, Change};
use super::expand::{LONGEST, expand};
use super::parse::{self, Command, Copy, Dockerfile, Instruction, Source, Stage, Step};
use super::pattern::Ignore;
use super::state::{Files, State};
use super::transfer::{Request, expand_text, import};
use super::{DockerfileOptions, RunCommand, StepRunner, Whiteouts};
use crate::error::{Error, IoContext, Result};
use crate::machine;
use crate::oci::{ImageSource, add_mount_points, architecture, start_of};
use crate::progress::{Job, Progress};
use crate::store::{Recipe, Scratch, Templates, check_name};
use crate::tree::{LastLink, Limits, Meta, Tree};

const MAX_DOCKERFILE: usize = 1 << 20;

impl Templates {
    /// Builds a template from a Dockerfile. Cancel-safe if dropping the runner's sandbox ends it.
    pub async fn build_dockerfile(
        &self,
        options: DockerfileOptions,
        runner: &dyn StepRunner,
        progress: Arc<dyn Progress>,
    ) -> Result<TemplateManifest> {
        check_name(&options.name)?;
        let job = Job::new(progress);
        let text = options.dockerfile.as_str();
        if text.len() > MAX_DOCKERFILE {
            return Err(Error::Dockerfile {
                line: 1,
                why: format!("it is longer than {MAX_DOCKERFILE} bytes"),
            });
        }
        let file = parse::parse(text)?;
        let (store, context) = (self.clone(), options.context.clone());
        let (scratch, context) = job
            .blocking(move |job| {
                let ignore = Ignore::load(&context)?;
                Ok((
                    store.scratch()?,
                    Arc::new(copy::load_context(&context, &ignore, job)?),
                ))
            })
            .await?;
        let globals = global_args(&file, &options.args)?;
        let mut build = Build {
            store: self,
            runner,
            job: &job,
            options: &options,
            file: &file,
            globals,
            context,
            scratch: Arc::new(scratch),
            images: Vec::new(),
            done: BTreeMap::new(),
            step: 0,
            steps: 0,
            archives: 0,
        };
        let state = build.run().await?;
        let command = state.command();
        let recipe = Recipe {
            source: TemplateSource::Dockerfile {
                digest: format!("sha256:{}", hex::encode(Sha256::digest(text))),
                base: state.base.clone(),
            },
            env: state.env.clone(),
            workdir: state.workdir.clone(),
            user: state.final_user(),
            start: start_of(options.start, command.as_ref())?,
            command,
            exposed_ports: state.ports.clone(),
            network: None,
            resources: None,
        };
        let (store, name, now) = (self.clone(), options.name.clone(), options.now);
        // `build` holds what the tree's contents point to.
        job.blocking(move |job| match &state.files {
            Files::Image(digest) => store.add_blob(digest, &recipe, Some(&name), now),
            Files::Tree(tree) => store.add(tree, &recipe, Some(&name), now, job),
        })
        .await
    }
}

struct Build<'a> {
    store: &'a Templates,
    runner: &'a dyn StepRunner,
    job: &'a Job,
    options: &'a DockerfileOptions,
    file: &'a Dockerfile,
    /// What `ARG` before the first `FROM` says, and what Docker says by itself.
    globals: BTreeMap<String, String>,
    context: Arc<Tree>,
    scratch: Arc<Scratch>,
    /// Keeps the files of base images until the end.
    images: Vec<Scratch>,
    done: BTreeMap<usize, State>,
    step: u64,
    steps: u64,
    archives: usize,
}

impl Build<'_> {
    async fn run(&mut self) -> Result<State> {
        let bases = self.bases()?;
        let target = self.target()?;
        let needed = self.needed(target, &bases);
        self.steps = needed
            .iter()
            .map(|&index| 1 + self.file.stages[index].steps.len() as u64)
            .sum();
        for index in needed {
            let stage = &self.file.stages[index];
            let mut state = self.from(index, stage, &bases[index]).await?;
            for step in &stage.steps {
                self.announce(step.line, &step.text)?;
                Box::pin(self.step(&mut state, index, step)).await?;
                // Many of them do no more than compute, and others wait.
                tokio::task::yield_now().await;
            }
            if index != target {
                // In the store, rather than all of them in memory.
                let image = self.materialize(&state.files, state.key.clone()).await?;
                state.files = Files::Image(image);
            }
            self.done.insert(index, state);
        }
        self.done.remove(&target).ok_or(Error::Stopped)
    }

    fn announce(&mut self, line: usize, text: &str) -> Result<()> {
        self.step += 1;
        let text: String = text.chars().take(200).collect();
        self.job.report(
            "building",
            self.step - 1,
            self.steps,
            &format!("line {line}: {text}"),
        )
    }

    /// The base of each stage with global arguments put in. What is not for this machine is refused.
    fn bases(&self) -> Result<Vec<String>> {
        let lookup = |name: &str| self.globals.get(name).cloned();
        let put_in = |stage: &Stage, text: &str| {
            expand(text, self.file.escape, &lookup).map_err(|why| at(stage.line, why))
        };
        self.file
            .stages
            .iter()
            .map(|stage| {
                if let Some(platform) = &stage.platform {
                    check_platform(&put_in(stage, platform)?).map_err(|why| at(stage.line, why))?;
                }
                let base = put_in(stage, &stage.base)?;
                match base.is_empty() {
                    true => Err(at(
                        stage.line,
                        format!("FROM {} names nothing; give its ARG a value", stage.base),
                    )),
                    false => Ok(base),
                }
            })
            .collect()
    }

    fn target(&self) -> Result<usize> {
        match &self.options.target {
            None => Ok(self.file.stages.len() - 1),
            Some(name) => self
                .stage_named(name, self.file.stages.len())
                .ok_or_else(|| at(1, format!("there is no stage `{name}`"))),
        }
    }

    /// A stage before `before`, by name or number.
    fn stage_named(&self, name: &str, before: usize) -> Option<usize> {
        let lower = name.to_ascii_lowercase();
        let by_name = self.file.stages[..before]
            .iter()
            .rposition(|stage| stage.name.as_ref() == Some(&lower));
        by_name.or_else(|| name.parse().ok().filter(|&number: &usize| number < before))
    }

    /// Which stages the target needs, in order.
    fn needed(&self, target: usize, bases: &[String]) -> Vec<usize> {
        let mut needed = std::collections::BTreeSet::new();
        let mut pending = vec![target];
        while let Some(index) = pending.pop() {
            if !needed.insert(index) {
                continue;
            }
            let base = self.file.stages[..index]
                .iter()
                .rposition(|stage| stage.name.as_deref() == Some(&bases[index].to_ascii_lowercase()));
            pending.extend(base);
            for step in &self.file.stages[index].steps {
                if let Instruction::Copy(Copy { from: Some(from), .. }) = &step.instruction {
                    pending.extend(self.stage_named(from, index));
                }
            }
        }
        needed.into_iter().collect()
    }

    async fn from(&mut self, index: usize, stage: &Stage, base: &str) -> Result<State> {
        self.announce(stage.line, &format!("FROM {base}"))?;
        let earlier = self.file.stages[..index]
            .iter()
            .rposition(|stage| stage.name.as_deref() == Some(&base.to_ascii_lowercase()));
        if let Some(earlier) = earlier
            && let Some(state) = self.done.get(&earlier)
        {
            let mut state = state.clone();
            state.args.clear();
            state.own_cmd = false;
            return Ok(state);
        }
        self.base(base).await.map_err(|error| match error {
            Error::BadReference { why, .. } => at(
                stage.line,
                format!("`{base}` is neither a template nor an image: {why}"),
            ),
            other => other,
        })
    }

    /// A template of this store, `scratch`, or an image from a registry.
    async fn base(&mut self, base: &str) -> Result<State> {
        let mut state = State {
            files: Files::Tree(Arc::default()),
            key: String::new(),
            base: base.to_owned(),
            env: BTreeMap::from([("PATH".to_owned(), machine::PATH.to_owned())]),
            args: BTreeMap::new(),
            workdir: "/".into(),
            user: None,
            template_user: None,
            shell: vec!["/bin/sh".into(), "-c".into()],
            entrypoint: None,
            cmd: None,
            own_cmd: false,
            ports: Vec::new(),
        };
        if base == "scratch" {
            let mut tree = Tree::default();
            add_mount_points(&mut tree)?;
            state.files = Files::Tree(Arc::new(tree));
            state.advance(&["scratch"]);
            return Ok(state);
        }
        let is_id = base.parse::<atoll_types::TemplateId>().is_ok();
        if (is_id || check_name(base).is_ok())
            && let Some(template) = self.store.find(base)?
        {
            state.advance(&["template", &template.digest]);
            state.files = self.held(template.digest)?.ok_or_else(|| Error::NotFound {
                wanted: base.to_owned(),
            })?;
            state.env.extend(template.env);
            state.workdir = template.workdir;
            state.template_user = Some(template.user);
            state.ports = template.exposed_ports;
            if let Some(command) = template.command {
                let said = |argv: Vec<String>| (!argv.is_empty()).then_some(argv);
                (state.entrypoint, state.cmd) = (said(command.entrypoint), said(command.cmd));
            }
            return Ok(state);
        }
        if is_id {
            // No registry is told of it.
            return Err(Error::NotFound {
                wanted: base.to_owned(),
            });
        }
        self.image_base(state, base).await
    }

    /// An image of a registry. Its files come from the cache when a build has begun with the same image before.
    async fn image_base(&mut self, mut state: State, base: &str) -> Result<State> {
        let login = self.options.login.clone();
        let (digest, config) = self.store.resolve_image(base, login.clone(), self.job).await?;
        state.advance(&["image", &digest]);
        state.env = config.env();
        state.workdir = config.workdir();
        state.user = Some(config.user());
        state.ports = config.ports();
        let run = config.run();
        (state.entrypoint, state.cmd) = (run.entrypoint.clone(), run.cmd.clone());
        if let Some(cached) = self.cached(&state.key)? {
            state.files = cached;
            return Ok(state);
        }
        let source = ImageSource::Registry {
            reference: base.to_owned(),
            login,
        };
        let mut opened = self.store.open_image(source, Limits::default(), self.job).await?;
        if opened.digest != digest {
            return Err(Error::Registry {
                reference: base.to_owned(),
                why: "it was pushed again during the build; build again".into(),
            });
        }
        add_mount_points(&mut opened.tree)?;
        state.files = Files::Tree(Arc::new(opened.tree));
        self.images.push(opened.scratch);
        Ok(state)
    }

    async fn step(&mut self, state: &mut State, stage: usize, step: &Step) -> Result<()> {
        let word = |state: &State, text: &str| {
            expand(text, self.file.escape, &|name| state.lookup(name)).map_err(|why| at(step.line, why))
        };
        match &step.instruction {
            Instruction::Env(pairs) => {
                // All values see the environment before this instruction.
                let mut values = Vec::new();
                let mut length = 0;
                for (name, value) in pairs {
                    let value = word(state, value)?;
                    length += name.len() + value.len();
                    fits(step.line, length)?;
                    values.push((name.clone(), value));
                }
                state.env.extend(values);
                fits(step.line, text_of(&state.env))?;
            }
            Instruction::Arg(args) => {
                let mut length = 0;
                for (name, default) in args {
                    let value = match (self.options.args.get(name), default) {
                        (Some(given), _) => Some(given.clone()),
                        (None, Some(default)) => Some(word(state, default)?),
                        // That of an `ARG` before the first `FROM`, or of those that need none.
                        (None, None) => self.globals.get(name).cloned(),
                    };
                    if let Some(value) = value {
                        length += name.len() + value.len();
                        fits(step.line, length)?;
                        state.args.insert(name.clone(), value);
                    }
                }
                fits(step.line, text_of(&state.args))?;
            }
            Instruction::Workdir(dir) => {
                state.workdir = absolute(&state.workdir, &word(state, dir)?);
                self.make_workdir(state)
                    .await
                    .map_err(|error| on(step.line, error))?;
            }
            Instruction::User(user) => state.user = Some(word(state, user)?),
            Instruction::Shell(argv) => state.shell.clone_from(argv),
            Instruction::Cmd(command) => (state.cmd, state.own_cmd) = (Some(state.argv(command)), true),
            Instruction::Entrypoint(command) => {
                state.entrypoint = Some(state.argv(command));
                // One that was inherited was meant for another program.
                state.cmd = state.cmd.take().filter(|_| state.own_cmd);
            }
            Instruction::Expose(ports) => {
                let mut exposed = vec![false; 1 << 16];
                for port in &state.ports {
                    exposed[usize::from(*port)] = true;
                }
                for port in ports {
                    let port = word(state, port)?;
                    expose(&port, &mut exposed).map_err(|why| at(step.line, why))?;
                }
                let numbers = (0..=u16::MAX).zip(exposed);
                state.ports = numbers.filter(|(_, is)| *is).map(|(port, _)| port).collect();
            }
            Instruction::Run(command) => self.run_step(state, step, command).await?,
            Instruction::Copy(copy) => self.copy_step(state, stage, step, copy, false).await?,
            Instruction::Add(copy) => self.copy_step(state, stage, step, copy, true).await?,
            Instruction::Noted => {}
        }
        Ok(())
    }

    async fn run_step(&mut self, state: &mut State, step: &Step, command: &Command) -> Result<()> {
        let mut env = state.args.clone();
        env.extend(state.env.clone());
        let command = RunCommand {
            argv: state.argv(command),
            env,
            workdir: state.workdir.clone(),
            user: state.user.clone().unwrap_or_else(|| "root".into()),
        };
        let before = state.key.clone();
        let environment: String = command
            .env
            .iter()
            .map(|(name, value)| format!("{name}={value}\0"))
            .collect();
        let argv = command.argv.join("\0");
        let mut parts = vec!["run", &argv, &environment, &command.workdir, &command.user];
        let network = self.options.network.as_ref().map(network_key).transpose()?;
        if let Some(network) = &network {
            parts.extend(["network", network]);
        }
        state.advance(&parts);
        if !self.options.no_cache
            && let Some(files) = self.cached(&state.key)?
        {
            self.job.report(
                "building",
                self.step - 1,
                self.steps,
                &format!("line {}: cached", step.line),
            )?;
            state.files = files;
            return Ok(());
        }
        let image = self.materialize(&state.files, before).await?;
        self.archives += 1;
        let archive = self.scratch.path().join(format!("run-{}.tar", self.archives));
        let whiteouts = self.execute(step, &image, command, &archive).await?;
        let (store, key, scratch) = (self.store.clone(), state.key.clone(), Arc::clone(&self.scratch));
        let digest = self
            .job
            .blocking(move |job| {
                let tree = import(&store, &image, &archive, whiteouts, job)?;
                let digest = store.cache(&key, &tree, &scratch, job)?;
                std::fs::remove_file(&archive).doing("remove", &archive)?;
                Ok(digest)
            })
            .await?;
        state.files = Files::Image(digest);
        Ok(())
    }

    async fn execute(
        &self,
        step: &Step,
        image: &str,
        command: RunCommand,
        archive: &Path,
    ) -> Result<Whiteouts> {
        let failed = |why: String| Error::Runner { line: step.line, why };
        let text = step.text.chars().take(200).collect();
        let mut sandbox = self.runner.start(image).await.map_err(failed)?;
        let output = |bytes: &[u8]| {
            let text = String::from_utf8_lossy(bytes);
            for line in text.lines() {
                let _stop_is_seen_later = self.job.report("building", self.step - 1, self.steps, line);
            }
        };
        let result = match sandbox.run(command, &output).await {
            Ok(0) => sandbox.export(archive).await.map_err(failed),
            Ok(code) => Err(Error::StepFailed {
                line: step.line,
                command: text,
                code,
            }),
            Err(why) => Err(failed(why)),
        };
        sandbox.destroy().await;
        result
    }

    /// A state that was cached.
    fn cached(&self, key: &str) -> Result<Option<Files>> {
        self.store
            .cached(key)?
            .map_or(Ok(None), |digest| self.held(digest))
    }

    /// An image, which stays until this build is over. `None`: it has just gone.
    fn held(&self, digest: String) -> Result<Option<Files>> {
        let held = self.store.hold(&digest, &self.scratch)?;
        Ok(held.then_some(Files::Image(digest)))
    }

    /// The state as an image in the store: `RUN` needs one to start from.
    async fn materialize(&self, files: &Files, key: String) -> Result<String> {
        match files {
            Files::Image(digest) => Ok(digest.clone()),
            Files::Tree(tree) => {
                if let Some(Files::Image(digest)) = self.cached(&key)? {
                    return Ok(digest);
                }
                let (store, tree, scratch) =
                    (self.store.clone(), Arc::clone(tree), Arc::clone(&self.scratch));
                self.job
                    .blocking(move |job| store.cache(&key, &tree, &scratch, job))
                    .await
            }
        }
    }

    async fn tree(&self, files: &Files) -> Result<Arc<Tree>> {
        match files {
            Files::Tree(tree) => Ok(Arc::clone(tree)),
            Files::Image(digest) => {
                let (store, digest) = (self.store.clone(), digest.clone());
                self.job
                    .blocking(move |_| store.blob_tree(&digest).map(Arc::new))
                    .await
            }
        }
    }

    async fn make_workdir(&self, state: &mut State) -> Result<()> {
        let mut tree = self.tree(&state.files).await?;
        let path = state.workdir.clone().into_bytes();
        match tree.lookup(&path, LastLink::Follow)? {
            Some(id) if tree.entries(id).is_some() => return Ok(()),
            Some(_) => {
                return Err(Error::Invalid(format!(
                    "`{}` exists and is not a directory",
                    state.workdir
                )));
            }
            None => {}
        }
        Arc::make_mut(&mut tree).make_dirs(&path, &Meta::root(0o755))?;
        state.files = Files::Tree(tree);
        let dir = state.workdir.clone();
        state.advance(&["workdir", &dir]);
        Ok(())
    }

    async fn copy_step(
        &mut self,
        state: &mut State,
        stage: usize,
        step: &Step,
        copy: &Copy,
        add: bool,
    ) -> Result<()> {
        let word = |text: &str| {
            expand(text, self.file.escape, &|name| state.lookup(name)).map_err(|why| at(step.line, why))
        };
        let mut into = self.tree(&state.files).await?;
        let owner = match &copy.chown {
            Some(text) => copy::owner(&into, &word(text)?).map_err(|error| on(step.line, error))?,
            None => (0, 0),
        };
        let mode = match &copy.chmod {
            Some(text) => Some(word(text).and_then(|text| {
                u16::from_str_radix(&text, 8)
                    .ok()
                    .filter(|mode| *mode <= 0o7777)
                    .ok_or_else(|| {
                        at(
                            step.line,
                            format!("--chmod={text} is not an octal mode such as 755"),
                        )
                    })
            })?),
            None => None,
        };
        let destination = absolute(&state.workdir, &word(&copy.destination)?);
        let mut paths = Vec::new();
        let mut inline = Vec::new();
        for source in &copy.sources {
            match source {
                Source::Path(path) => paths.push(word(path)?),
                Source::Inline { name, text, expand } => {
                    let text = if *expand {
                        expand_text(text, &word)?
                    } else {
                        text.clone()
                    };
                    inline.push((name.clone(), text));
                }
            }
        }
        if add
            && let Some(url) = paths
                .iter()
                .find(|path| path.contains("://") || path.starts_with("git@"))
        {
            return Err(at(
                step.line,
                format!(
                    "ADD of `{url}` is not supported; download it with RUN curl, or beforehand into the context"
                ),
            ));
        }
        // From the context everything belongs to root; between stages owners stay, unless they are set.
        let keeps_owner = copy.from.is_some() && copy.chown.is_none();
        let change = Change {
            owner: (!keeps_owner).then_some(owner),
            mode,
        };
        let from = match &copy.from {
            None => Arc::clone(&self.context),
            Some(name) => {
                let name = word(name)?;
                let earlier = self
                    .stage_named(&name, stage)
                    .and_then(|index| self.done.get(&index))
                    .cloned();
                let state = match earlier {
                    Some(state) => state,
                    None => self.base(&name).await.map_err(|error| on(step.line, error))?,
                };
                self.tree(&state.files).await?
            }
        };
        let request = Request {
            from,
            paths,
            inline,
            destination,
            change,
            unpack: add,
            first_archive: self.archives,
        };
        self.archives += request.paths.len();
        let scratch = Arc::clone(&self.scratch);
        let (tree, digest) = self
            .job
            .blocking(move |job| {
                let planned = request.plan(&into, &scratch, job)?;
                let digest = copy::digest(&planned, job)?;
                copy::apply(Arc::make_mut(&mut into), planned, request.change)?;
                Ok((into, digest))
            })
            .await
            .map_err(|error| on(step.line, error))?;
        state.files = Files::Tree(tree);
        state.advance(&["copy", &digest]);
        Ok(())
    }
}

/// Arguments that stand before the first `FROM`, each with those before it put in. Docker brings some about platforms
/// itself; here there is one platform, that of this machine.
fn global_args(file: &Dockerfile, given: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>> {
    let mut args = BTreeMap::new();
    for whose in ["TARGET", "BUILD"] {
        for (what, value) in [
            ("PLATFORM", format!("linux/{}", architecture())),
            ("OS", "linux".to_owned()),
            ("ARCH", architecture().to_owned()),
            ("VARIANT", String::new()),
        ] {
            args.insert(format!("{whose}{what}"), value);
        }
    }
    let mut length = 0;
    for (name, default) in &file.args {
        let lookup = |name: &str| args.get(name).cloned();
        let value = match (given.get(name), default) {
            (Some(given), _) => given.clone(),
            (None, Some(default)) => expand(default, file.escape, &lookup).map_err(|why| at(1, why))?,
            (None, None) => continue,
        };
        length += name.len() + value.len();
        fits(1, length)?;
        args.insert(name.clone(), value);
    }
    Ok(args)
}

fn check_platform(platform: &str) -> Result<(), String> {
    let ours = format!("linux/{}", architecture());
    let variants = ["", "/v1", "/v8"];
    match variants
        .iter()
        .any(|variant| platform == format!("{ours}{variant}"))
    {
        true => Ok(()),
        false => Err(format!(
            "FROM --platform={platform} is not supported: this machine is {ours}, and runs nothing else"
        )),
    }
}

fn network_key(network: &NetworkPolicy) -> Result<String> {
    serde_json::to_string(network)
        .map_err(|error| Error::Invalid(format!("the policy of the steps cannot be written: {error}")))
}

/// `path` seen from `dir`, without `.` and `..`; a slash at the end stays.
fn absolute(dir: &str, path: &str) -> String {
    let joined = match path.starts_with('/') {
        true => path.to_owned(),
        false => format!("{dir}/{path}"),
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in joined.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let mut clean = format!("/{}", parts.join("/"));
    let means_directory = path.ends_with('/') || path == "." || path.ends_with("/.") || path.ends_with("..");
    if means_directory && clean.len() > 1 {
        clean.push('/');
    }
    clean
}

/// What a template may say of its environment, and a build of its arguments: less than a manifest may have, but for what is
/// replaced again.
fn fits(line: usize, length: usize) -> Result<()> {
    match length > LONGEST {
        true => Err(at(
            line,
            format!("variables of more than {LONGEST} bytes together"),
        )),
        false => Ok(()),
    }
}

fn text_of(variables: &BTreeMap<String, String>) -> usize {
    variables
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum()
}

/// One flag for each port.
fn expose(text: &str, ports: &mut [bool]) -> Result<(), String> {
    let number = match text.split_once('/') {
        Some((_, protocol)) if protocol.eq_ignore_ascii_case("udp") => return Ok(()),
        Some((number, protocol)) if protocol.eq_ignore_ascii_case("tcp") => number,
        Some(_) => return Err(format!("EXPOSE {text}: the protocol must be tcp or udp")),
        None => text,
    };
    let bad = || format!("EXPOSE {text}: not a port");
    let (first, last) = number.split_once('-').unwrap_or((number, number));
    let (first, last): (u16, u16) = (
        first.parse().map_err(|_| bad())?,
        last.parse().map_err(|_| bad())?,
    );
    if first == 0 || last < first || last - first > 1000 {
        return Err(bad());
    }
    ports[usize::from(first)..=usize::from(last)].fill(true);
    Ok(())
}

fn at(line: usize, why: impl Into<String>) -> Error {
    Error::Dockerfile {
        line,
        why: why.into(),
    }
}

/// Says on which line an error of the input happened.
fn on(line: usize, error: Error) -> Error {
    match error {
        Error::Invalid(why) => at(line, why),
        Error::Path { path, why } => at(line, format!("`{path}`: {why}")),
        other => other,
    }
}
