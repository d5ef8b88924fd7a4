//! Turns a tar archive of a root filesystem into an image: `tar2erofs ROOT.tar OUT.erofs`.

use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, tar, out] = &args[..] else {
        return Err("usage: tar2erofs ROOT.tar OUT.erofs".into());
    };
    let start = Instant::now();
    let mut tree = atoll_image::Tree::default();
    let report = atoll_image::apply_layer(
        &mut tree,
        atoll_image::Content::whole_file(Path::new(tar))?,
        atoll_image::Whiteouts::None,
        |_| Ok(()),
    )?;
    eprintln!("{report:?} after {:?}", start.elapsed());
    let mut file = std::fs::File::create(out)?;
    let written = atoll_image::write_image(&tree, &mut file, |_, _| Ok(()))?;
    eprintln!("{written:?} after {:?}", start.elapsed());
    Ok(())
}
