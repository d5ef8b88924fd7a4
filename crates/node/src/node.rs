//! The one way from control to a machine.

use std::collections::HashSet;
use std::fmt::Debug;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use atoll_guest_protocol::{Message, Request};
use atoll_lifecycle::Liveness;
use atoll_policy::{Decision, Policy};
use atoll_runtime::channel::{ChannelError, Stream, in_time};
use atoll_types::{
    Fault, Hook, InstanceId, Isolation, ProjectId, ReadyCheck, Resources, SandboxId, SaveKind, SnapshotId,
    TemplateManifest, Usage, VolumeId,
};
use atoll_volumes::{Entry as VolumeEntry, Metadata as VolumeMetadata, WriteFile as WriteInVolume};
use tokio::sync::mpsc;

use crate::builds::{BuildEvent, BuildTemplate, Builder};
use crate::hooks;
use crate::words::{
    Admission, Begins, Boot, ByteSource, ByteStream, Claimed, Event, Failed, Greeting, NetworkUsage, Offer,
    PoolView, Save, SavedBytes, SavedGarbage, VolumeLook, Wanted,
};

/// A machine that runs instances, as control knows it.
///
/// What must hold of all that is said to it:
/// - What is said names things by id, and is plain data; what takes a while is answered when it is over, each by its own
///   answer. Methods that are not `async` are said and not answered.
/// - Nothing said twice does harm: to destroy, thaw, dismiss or forget what is gone succeeds.
/// - A future that is dropped may have begun its work; whoever does so says what is to become of the instance.
/// - What happens unasked comes as [`Event`]s.
///
/// It has a part for each kind of thing on a machine: [`Instances`], [`Guests`], [`Cables`], [`SavedState`], [`VolumeBytes`].
#[async_trait]
pub trait Node:
    Instances + Guests + Cables + SavedState + VolumeBytes + Debug + Send + Sync + 'static
{
    /// What this machine can do.
    fn offer(&self) -> &Offer;

    /// What happens from the start on. One may listen.
    fn events(&self) -> mpsc::Receiver<Event>;

    /// Takes the cables of instances other than these: control has found out what it has here.
    async fn recovered(&self, kept: &HashSet<InstanceId>);

    /// Keeps pools full from now on.
    fn start(&self);

    /// Nothing new is begun, and what is tried again and again is given up.
    fn stop(&self);

    /// Returns when what was under way is over. Instances that were pooled are gone; the others go on.
    async fn close(&self);

    async fn pools(&self) -> Vec<PoolView>;

    /// A name may stand for another template now.
    fn templates_changed(&self);

    /// Builds a template of a project, or one for all that a project builds, and tells how that goes. Dropping it stops the
    /// build, which leaves nothing behind.
    async fn build(
        &self,
        request: BuildTemplate,
        builder: Builder,
        progress: mpsc::Sender<Result<BuildEvent, Fault>>,
    ) -> Result<TemplateManifest, Fault>;
}

/// What runs, and what a machine does with it.
#[async_trait]
pub trait Instances {
    /// Takes a pooled instance of exactly this kind, if one is ready. Until it is greeted or destroyed it counts as the
    /// node's own.
    async fn claim(&self, wanted: &Wanted) -> Option<Claimed>;

    /// Boots an instance, when it is its turn, and waits until its agent answers. On error nothing of it is left.
    async fn boot(&self, boot: Boot) -> Result<(), Fault>;

    /// Instances of a tier that are here, whole or half-made, without those that are the node's own: pooled, or of builds.
    async fn discover(&self, isolation: Isolation) -> Result<Vec<InstanceId>, Fault>;

    /// Takes over an instance that was here before this node was started.
    async fn adopt(&self, isolation: Isolation, instance: &InstanceId) -> Liveness;

    /// From now on, tell when this sandbox's instance is over; also if it is already.
    fn attend(&self, sandbox: &SandboxId, instance: &InstanceId);

    /// Destroys an instance, however often it takes. Nothing leaves it from the first moment on.
    async fn destroy(&self, isolation: Isolation, instance: &InstanceId);

    /// Sets other limits; the disk stays as it is.
    async fn resize(
        &self,
        isolation: Isolation,
        instance: &InstanceId,
        resources: &Resources,
    ) -> Result<(), Fault>;

    /// What it has consumed, as the host counts it.
    async fn usage(&self, isolation: Isolation, instance: &InstanceId) -> Result<Usage, Fault>;
}

/// The agents in instances.
#[async_trait]
pub trait Guests: Sync {
    /// Tells a guest who it is and, in the same breath, what to run.
    async fn greet(&self, greeting: Greeting) -> Result<Option<Begins>, Failed>;

    /// Waits until what a template starts is ready to serve. What the check said when it was, where it says something.
    async fn await_ready(&self, instance: &InstanceId, ready: &ReadyCheck) -> Result<Vec<u8>, Failed>;

    /// Runs the hooks one after the other; the first that fails ends it, which is the inner result.
    async fn run_hooks(
        &self,
        instance: &InstanceId,
        hooks: &[Hook],
    ) -> Result<Result<(), hooks::Failed>, ChannelError>;

    /// Opens a stream of bytes and messages to a guest, with back-pressure both ways.
    async fn open(&self, instance: &InstanceId, request: &Request) -> Result<Stream, ChannelError>;

    /// A request that is answered at once, with at most one message.
    async fn call(&self, instance: &InstanceId, request: &Request) -> Result<Option<Message>, ChannelError> {
        in_time(async { self.open(instance, request).await?.answer().await }).await
    }

    /// Whether an agent that is there does not answer within this time. Of one that is gone, its streams tell.
    async fn is_silent(&self, instance: &InstanceId, within: Duration) -> bool;

    /// Ends all streams to a guest; no others are opened.
    fn hang_up(&self, instance: &InstanceId);
}

/// The way out of instances, and what went through it.
#[async_trait]
pub trait Cables {
    /// Puts a sandbox behind the cable of an instance, or what it may do now in place of what it might before.
    fn admit(&self, instance: &InstanceId, admission: Admission);

    /// Nothing leaves it from now on.
    fn dismiss(&self, instance: &InstanceId);

    /// Tells a guest what it has to know of the way out.
    async fn tell_network(&self, instance: &InstanceId, admission: Option<Admission>) -> Result<(), Failed>;

    /// How long an instance has had no connection to the world open: no time at all while it has one, `None` if it has had
    /// none since its sandbox was admitted here.
    async fn quiet_for(&self, instance: &InstanceId) -> Option<Duration>;

    /// What went through a sandbox's way out and was not taken yet.
    async fn network_pending(&self, sandbox: &SandboxId) -> NetworkUsage;

    /// All of that, of everybody, to be written down; forgotten here.
    async fn take_network_usage(&self) -> Vec<(SandboxId, NetworkUsage)>;

    /// Whether a policy refuses an address for being this machine's own.
    async fn own_address(&self, policy: Arc<Policy>, address: IpAddr) -> Option<Decision>;
}

/// The state of instances that are not there, or not any more.
#[async_trait]
pub trait SavedState {
    /// Holds an instance still and saves it, durably. It stays still. On error nothing of the save is left.
    async fn save(&self, save: Save) -> Result<SavedBytes, Fault>;

    /// Lets an instance go on that is held still.
    async fn thaw(&self, isolation: Isolation, instance: &InstanceId) -> Result<(), Fault>;

    /// Holds an instance still and keeps its state for a moment, to make others of it. It stays still.
    async fn capture(
        &self,
        isolation: Isolation,
        instance: &InstanceId,
        kind: SaveKind,
        captured: &SnapshotId,
    ) -> Result<(), Fault>;

    /// The same of what was saved: it is read once, however many are made of it.
    async fn recall(&self, snapshot: &SnapshotId, captured: &SnapshotId) -> Result<(), Fault>;

    /// Lets go of what was captured.
    fn release(&self, captured: &SnapshotId);

    /// The same bytes under another id; only the list of them is copied.
    async fn copy_saved(&self, from: &SnapshotId, to: &SnapshotId) -> Result<SavedBytes, Fault>;

    /// Removes what was saved, if it is there. Its space comes back with a collection.
    async fn forget(&self, snapshot: &SnapshotId) -> Result<(), Fault>;

    /// The ids of all that is saved here.
    async fn saved(&self) -> Result<Vec<String>, Fault>;

    /// Removes these saves and gives back the space of what nothing refers to, or says what that would be.
    async fn collect_saved(&self, garbage: HashSet<String>, dry_run: bool) -> Result<SavedGarbage, Fault>;

    /// What was saved as one file, with a header of the caller's.
    async fn export_saved(&self, snapshot: &SnapshotId, header: Vec<u8>) -> Result<ByteStream, Fault>;

    /// Takes in such a file, of at most so many bytes; returns its header.
    async fn import_saved(
        &self,
        file: ByteSource,
        snapshot: &SnapshotId,
        project: &ProjectId,
        most: u64,
    ) -> Result<(Vec<u8>, SavedBytes), Fault>;
}

/// Volumes, as far as they are bytes. Who may see one is control's to say, and that nobody deletes what is used.
#[async_trait]
pub trait VolumeBytes {
    async fn create_volume(&self, id: &VolumeId, bytes: u64) -> Result<(), Fault>;

    /// Makes a volume that is only ever read of an image, which becomes the volume's own file.
    async fn seal_volume(&self, id: &VolumeId, image: &Path) -> Result<(), Fault>;

    async fn delete_volume(&self, id: &str) -> Result<(), Fault>;

    /// The ids of all that are here.
    async fn volumes(&self) -> Result<Vec<String>, Fault>;

    async fn look_at_volume(&self, id: &str) -> Result<VolumeLook, Fault>;

    /// It is on the host from now on, for instances to see.
    async fn attach_volume(&self, id: &str) -> Result<(), Fault>;

    /// Nobody sees it any more.
    async fn detach_volume(&self, id: &str) -> Result<(), Fault>;

    /// After a restart: lets go of all but these.
    async fn recover_volumes(&self, in_use: Vec<String>) -> Result<(), Fault>;

    /// All that is in it, as a tar archive.
    async fn export_volume(&self, id: &VolumeId) -> Result<ByteStream, Fault>;

    /// Adds what is in a tar archive; returns how many entries that were.
    async fn import_volume(&self, id: &VolumeId, archive: ByteSource) -> Result<u64, Fault>;

    /// What stands at a path.
    async fn volume_entry(&self, id: &VolumeId, path: String) -> Result<VolumeEntry, Fault>;

    /// What is below a directory; `depth` 1 is the directory itself.
    async fn volume_entries(
        &self,
        id: &VolumeId,
        path: String,
        depth: u32,
    ) -> Result<Vec<VolumeEntry>, Fault>;

    /// With `parents`, also those above it, and one that is there is fine.
    async fn make_dir_in_volume(
        &self,
        id: &VolumeId,
        path: String,
        metadata: VolumeMetadata,
        parents: bool,
    ) -> Result<VolumeEntry, Fault>;

    async fn set_metadata_in_volume(
        &self,
        id: &VolumeId,
        path: String,
        metadata: VolumeMetadata,
    ) -> Result<VolumeEntry, Fault>;

    /// With all that is below.
    async fn remove_from_volume(&self, id: &VolumeId, path: String) -> Result<(), Fault>;

    /// What stands there, and as many bytes as it says.
    async fn read_from_volume(&self, id: &VolumeId, path: String)
    -> Result<(VolumeEntry, ByteStream), Fault>;

    /// Whole or not at all.
    async fn write_into_volume(
        &self,
        id: &VolumeId,
        path: String,
        how: WriteInVolume,
        body: ByteStream,
    ) -> Result<VolumeEntry, Fault>;
}
