# Runs as the R kernel. Plots come as PNG, and tell nothing to a terminal that is not there.
options(jupyter.plot_mimetypes = "image/png", jupyter.rich_display = TRUE, bitmapType = "cairo")
IRkernel::main()
